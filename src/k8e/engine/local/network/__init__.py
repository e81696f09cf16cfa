"""The network of sandboxes: each has a wire of its own, and exactly as much of the network as its list allows.

pure          addresses (what a wire is called), rules (what the kernel does), admissions with expiry (what is open),
              record (what outlives the daemon), refusals, connection_limits
the kernel    netlink (its formats), table (nftables), wires (interfaces), routing_rules, watch (rules that go)
the machine   leases (wires that are taken), ip_forward, machine (all of these together)
network       one sandbox's network, from opening to removal
"""

"""The network of sandboxes: each has a wire of its own, and exactly as much of the network as its list allows.

Pure: addresses (what a wire is called), rules (what the kernel does), elements, admissions (what changes), record,
notes (what was refused). At the edge: netlink and table (the kernel), wires (interfaces), connections, leases and
forwarding (the machine), ground and network (all of it together).
"""

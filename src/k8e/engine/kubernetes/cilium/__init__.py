"""Lists of hosts by CiliumNetworkPolicy, where the cluster's network is Cilium (docs/kubernetes-egress.md)."""

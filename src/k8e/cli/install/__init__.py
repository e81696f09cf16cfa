"""k8e on a machine, for every user: what `k8e doctor --fix` puts where, and `k8e uninstall` takes away again."""

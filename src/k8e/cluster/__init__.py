"""A Kubernetes cluster of one's own: upstream's components, built from pinned Go modules, and their processes.

It imports nothing of sandboxes, and no engine imports it: an engine gets a kubeconfig, wherever its cluster comes from.
"""

"""`k8e doctor --engine kubernetes`."""

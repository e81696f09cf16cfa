"""`k8e sandbox-install-skill`: tells agents on this machine about us, in files that are theirs."""

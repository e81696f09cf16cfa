"""`k8e image`, and the user's credentials at registries."""

"""OCI runtimes, the bundle that they start, and the limits around it."""

"""Attacks by what stands between a sandbox and the machine: gVisor's own processes, or the root of a native sandbox."""

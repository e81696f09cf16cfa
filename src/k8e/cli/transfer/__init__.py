"""Copies of files and directories between this machine and a sandbox, for `k8e sandbox cp` and `agentkernel cp`."""

"""The commands of `k8e sandbox` but `run`: sessions with their runs and files, and approvals."""

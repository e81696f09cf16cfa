"""Backups of a cluster, and the way back from one."""

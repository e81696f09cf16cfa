"""The part of the daemon that decides: sessions, runs, ownership, quotas. Doors call its contract and nothing else."""

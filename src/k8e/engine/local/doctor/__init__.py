"""What works on this machine, found out by doing it, and what can be put right."""

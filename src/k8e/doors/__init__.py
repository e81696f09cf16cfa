"""The protocols through which requests come in, one room each. Doors translate and authenticate, nothing else."""

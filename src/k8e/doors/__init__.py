"""The protocols through which requests come in: one room each, and what they share. Doors translate and authenticate."""

"""A session from its creation to its end: made, used, stopped, started, recovered."""

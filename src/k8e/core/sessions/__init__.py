"""A session from its creation to its end: made, found, used, stopped, started, ended."""

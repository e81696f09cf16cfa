"""The database of sessions and runs."""

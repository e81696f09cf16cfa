"""What decides: sessions, runs, ownership, quotas. Doors call `Service` and nothing below it."""

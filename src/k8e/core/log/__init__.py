"""Written down for people: the audit log, the log of refusals, the daemon log, metrics."""

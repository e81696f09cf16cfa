"""What is written down for people: the audit log, the log of refusals, the journal, metrics."""

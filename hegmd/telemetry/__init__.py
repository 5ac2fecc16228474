"""What is visible from outside: the log, events, the audit record and metrics."""

"""What is seen from outside: the log, events, the audit record and metrics."""

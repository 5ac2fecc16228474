"""The outputs of the daemon: the log, events, the audit record and metrics."""

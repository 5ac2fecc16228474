"""The I/O of operations: one task for each, which executes effects and feeds back events."""

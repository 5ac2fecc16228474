"""The pure machine of an operation: states, events, effects, the table, and the next effects."""

"""The variables of a script that belong to its state, and how their values are restored."""

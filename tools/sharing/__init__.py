"""A simulator of sharing: a node that is a model, and the daemon's own policy that decides on it."""

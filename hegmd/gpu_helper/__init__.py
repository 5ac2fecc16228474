"""The GPU helper: a child of the daemon that may hang or be killed, and the daemon's side of it.

The child alone loads CUDA (`cuda`). It never holds the only copy of anything: what it fills belongs to descriptors that
the daemon has.
"""

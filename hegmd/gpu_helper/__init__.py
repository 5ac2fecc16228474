"""The GPU helper: a child of the daemon that may hang or be killed, and the daemon's side of it.

Only the child loads CUDA (`cuda`). It never holds the only copy of anything: the daemon has descriptors of all memory
that the child fills.
"""

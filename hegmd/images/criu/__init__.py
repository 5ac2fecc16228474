"""CRIU: where it is, what a tree of processes needs of it, how it dumps and restores one, and what its errors mean.

Knows nothing of GPUs but what of them must no longer be in a process, and nothing of image directories but the one
folder that CRIU writes to or reads from.
"""

"""CRIU: where it is, what a process tree needs of it, how it dumps and restores one, and what its errors mean.

Knows nothing of GPUs, except what a process must no longer have of them. It knows only that folder of an image
directory which CRIU writes to or reads from.
"""

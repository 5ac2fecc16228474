"""CRIU: where it is, what a process tree needs of it, how it dumps and restores one, and what its errors mean.

Knows nothing of GPUs, except what a process must no longer have of them. Of an image directory it knows only the folder
that CRIU writes to or reads from.
"""

"""The state of a training, saved by one process and restored by the next, for targets that no process image can reach.

Runs inside workers. Standard library only; uses torch and numpy if the job has imported them.
"""

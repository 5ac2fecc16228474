"""A training's state, written down by one process and put back by the next: for places where no process image can go.

Runs inside workers. Standard library only; torch and numpy are used where the job has imported them already.
"""

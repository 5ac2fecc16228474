"""The checks of `hegmctl doctor`: can this node do what hegmd needs, and which command fixes what is missing.

Checks change nothing. Each reports what it found with numbers, in one short line, and the next step. A check that does
not apply is skipped with the reason. Checks see `facts` only; `run` has their table.
"""

"""What `hegmctl doctor` shows: is this node fit for what hegmd does, and which command mends what is not.

Nothing here changes the node. Every check says what it found with numbers, in one short line, and names the step that
mends it; what does not apply is skipped with the reason. `facts` is all that checks see; `run` has the table of them
and makes them.
"""

"""Images: the directory that a running job is checkpointed into, from which it is brought back.

`folder` is the directory on disk and `byte_file`, `copy_file` the files in it: blocking code that runs with the rights
of whoever owns the image, in a process of its own (`child`) or in hegmctl. `images` is the daemon's side, which opens
no path of a caller itself: it asks such a process (`user_processes`) and gives it descriptors. `signature` is what
makes an image known as one that this node, or one that shares its key, has made.
"""

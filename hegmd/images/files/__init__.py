"""Images: the directory that a running job is checkpointed into and restored from.

`folder` is the directory on disk; `byte_file` and `copy_file` are the files in it. Their code blocks and runs with the
rights of the image's owner, in a process of its own (`child`) or in hegmctl. `images` is the daemon's side. It opens no
path of a caller itself: it asks such a process (`user_processes`) and passes descriptors. `signature` identifies an
image as written by this node, or by one that shares its key.
"""

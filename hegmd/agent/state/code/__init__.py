"""The position of a script in its own code, and the meaning of its loops and names there."""

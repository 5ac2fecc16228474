"""Where a script is in its own code, and what its loops and names mean there."""

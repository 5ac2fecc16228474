"""What a test of an interface needs, shipped with the interface: checks that any implementation has to pass."""

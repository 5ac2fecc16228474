"""What single values of a training are, and which of them a saved state can hold."""

"""The single values of a training, and which of them a saved state can hold."""

"""The file of a saved state: how values and tensors are encoded, copied and checked."""

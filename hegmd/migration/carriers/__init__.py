"""How the bytes of tensors leave a GPU and return. Each carrier is one module."""

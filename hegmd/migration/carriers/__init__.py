"""Carriers: copy the bytes of tensors off a GPU and back. Each carrier is one module."""

"""Sharing the GPUs of one node: the policy that decides who runs where, and what carries out its decisions."""

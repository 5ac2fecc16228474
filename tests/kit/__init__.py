"""Checks that any implementation of an interface has to pass."""

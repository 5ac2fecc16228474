"""How passes over data loaders are saved, and rebuilt in a new process."""

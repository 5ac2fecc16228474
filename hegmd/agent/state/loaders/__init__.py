"""Save passes over data loaders, and rebuild them in a new process."""

"""Save and restore the state of training frameworks. Each framework is one module."""

"""What a saved state has to know about training frameworks. Each framework is one module."""

"""What a saved state needs to know of training frameworks. Each framework is one module."""

"""How a saved state treats training frameworks. Each framework is one module."""

"""hegmd, the node daemon for GPU jobs. Holds the version and nothing else: workers load modules from this package."""

__version__ = "0.1.0"

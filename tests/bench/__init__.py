"""The figures that the daemon and its client are held to, measured on the machine at hand; never run under pytest."""

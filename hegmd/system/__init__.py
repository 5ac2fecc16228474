"""The daemon's interface to the operating system: programs, threads, descriptors, sockets, systemd, files."""

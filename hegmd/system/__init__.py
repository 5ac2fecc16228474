"""What the daemon needs of the operating system: programs, threads, descriptors, sockets, systemd, files."""

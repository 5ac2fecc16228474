"""Memory that outlives a process: the host pool, video memory held by descriptor, and what keeps descriptors."""

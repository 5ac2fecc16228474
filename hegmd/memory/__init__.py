"""Memory that outlives a process: the host pool, GPU memory held by descriptor, and descriptor stores."""

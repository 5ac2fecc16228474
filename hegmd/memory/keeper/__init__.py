"""The keeper: a small process that holds descriptors by name while there is no daemon to hold them.

For nodes without systemd, whose descriptor store does the same. There is one for each state directory, started by the
daemon on demand; it outlives the daemon however that ends, and ends by itself when it holds nothing and nobody is
connected. It looks into nothing that it holds.
"""

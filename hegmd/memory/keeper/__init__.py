"""The keeper: a small process that holds descriptors by name while no daemon runs.

For nodes without systemd, whose descriptor store does the same. One for each state directory, started by the daemon on
demand. It outlives the daemon, and exits when it holds nothing and no daemon is connected. It does not read what it
holds.
"""

"""The inventory: the node's GPUs, their state, and the processes on them, as of a moment ago.

`node` is the whole, the other modules are its parts. Everything belongs to the event loop, except calls to vendors'
libraries and reads of /proc, which `jobs` runs in threads that can be abandoned.
"""

from hegmd.node.inventory.node import Inventory, NodeSnapshot

__all__ = ["Inventory", "NodeSnapshot"]

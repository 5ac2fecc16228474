"""The inventory: what GPUs this node has, how they do, and which processes are on them, as of a moment ago.

`node` is the whole; the other modules are its parts. Everything here belongs to the event loop, except the calls to
the vendors' libraries and to /proc, which `jobs` runs in threads that may be left behind.
"""

from hegmd.node.inventory.node import Inventory, NodeSnapshot

__all__ = ["Inventory", "NodeSnapshot"]

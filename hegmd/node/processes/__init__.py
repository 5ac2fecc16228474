"""GPU processes: who stands behind the pids that the drivers name, and what each is to the node.

`table` holds identities and what the kernel says of them, `lookups` what has to be waited for, `roll` joins both with
the drivers' word into the records that callers see. The inventory drives them; nothing here knows the event loop.
"""

from hegmd.node.processes.roll import Roll, RollCall, Roster
from hegmd.node.processes.table import Presence, ProcessFacts, ProcessTable

__all__ = ["Presence", "ProcessFacts", "ProcessTable", "Roll", "RollCall", "Roster"]

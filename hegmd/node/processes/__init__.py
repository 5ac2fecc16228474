"""GPU processes: the identity of the pids that drivers report, and what each process is to the node.

`table` has identities and the kernel's facts, `lookups` what has to be waited for, `roll` combines both with the
drivers' reports into records. The inventory drives them; they use no event loop.
"""

from hegmd.node.processes.roll import ProcessList, ProcessListBuilder, ProcessListInputs
from hegmd.node.processes.table import ProcessFacts, ProcessTable, Visibility

__all__ = ["Visibility", "ProcessFacts", "ProcessTable", "ProcessList", "ProcessListInputs", "ProcessListBuilder"]

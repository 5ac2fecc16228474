"""How processes leave their GPUs and how their bytes are copied. Each method and each carrier is one module.

Their interface is in `migration/contracts`. The planner chooses between them, and the machine decides when to call
them.
"""

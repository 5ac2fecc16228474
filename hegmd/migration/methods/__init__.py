"""How processes leave their GPUs and how their bytes are carried. Each method and each carrier is one module.

What they have in common is in `migration/contracts`; which of them is used is the planner's to say, and when, the
machine's.
"""

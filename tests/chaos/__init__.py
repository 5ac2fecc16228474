"""Kills and faults at each state of each operation, while jobs train: real processes, no code for it in the product.

The daemon is halted at the records of its journal (`halts`, with tests/stubs/halt loaded into it), something is struck
(`cells` says what, `node` and `faults` do it), and `campaign` sees that nothing was lost, changed or left behind.
"""

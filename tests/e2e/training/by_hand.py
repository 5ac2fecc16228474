"""No framework: a loop by hand that says itself where a batch ends. Needs nothing but Python.

With hegm it goes slowly, and not by keeping a processor busy.
"""

import random
import select

try:
    import hegm
except ImportError:
    hegm = None

random.seed(8)
weight = 0.0
for _step in range(1500):
    for _ in range(150):
        weight += 1e-4 * (random.gauss(3, 1) - weight)
    print(weight.hex())
    if hegm is not None:
        hegm.boundary()
        select.select([], [], [], 0.001)

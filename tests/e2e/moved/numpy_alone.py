"""No framework at all: a least squares fit in plain numpy, which the agent cannot stop between two batches."""

import numpy as np

draw = np.random.default_rng(12)
inputs = draw.normal(size=(4096, 64))
targets = inputs @ draw.normal(size=64)
weights = np.zeros(64)
for step in range(1000):
    rows = draw.integers(0, len(inputs), 256)
    error = inputs[rows] @ weights - targets[rows]
    weights -= 1e-2 * inputs[rows].T @ error / len(rows)
    print("step", step, float(error @ error).hex(), flush=True)
np.save("weights.npy", weights)

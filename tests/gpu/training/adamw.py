"""A training whose weights and AdamW's moments take so much: adamw.py GIB [made-there]; it knows nothing of hegm.

Prints the process, the number of the step in its epoch and the loss, bit for bit, after each step, and when it had come
how far at its beginning. The weights are on the GPU where there is one: made on the CPU and sent there, or made there.
"""

import os
import sys
import time

print("mark began", time.time(), flush=True)

import torch  # noqa: E402 - what this takes is told
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402 - it comes with that

print("mark imported", time.time(), flush=True)
size_bytes = int(float(sys.argv[1]) * (1 << 30))
WIDE = 4096 if size_bytes >= 1 << 30 else 256
# Weights and two moments, of four bytes each.
layers = max(1, size_bytes // (WIDE * WIDE * 4 * 3))
torch.manual_seed(7)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
with torch.device(device if "made-there" in sys.argv else "cpu"):
    body = [module for _ in range(layers) for module in (torch.nn.Linear(WIDE, WIDE), torch.nn.ReLU())]
    model = torch.nn.Sequential(*body, torch.nn.Linear(WIDE, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
examples = 2048 if "made-there" in sys.argv else 65536
loader = DataLoader(
    TensorDataset(torch.randn(examples, WIDE), torch.randint(0, 10, (examples,))), batch_size=16, shuffle=True
)

print("mark built", time.time(), flush=True)
for _epoch in range(1000):
    for number, (inputs, labels) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", os.getpid(), number, float(loss).hex(), flush=True)

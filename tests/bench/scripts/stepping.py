"""A small training that makes as many steps as each line of its input says, and tells how long they took.

It knows nothing of hegm. The answer to a line is one of its own: wall time and processor time, in seconds.
"""

import itertools
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.set_num_threads(1)
inputs = torch.randn(4096, 128)
targets = inputs.sum(1, keepdim=True)
model = torch.nn.Sequential(
    torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)


source = iter(batch for _ in itertools.count() for batch in loader)
for line in sys.stdin:
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(int(line)):
        batch, target = next(source)
        loss = torch.nn.functional.mse_loss(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(time.perf_counter() - began, time.process_time() - began_cpu, flush=True)

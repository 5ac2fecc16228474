"""A training at the top of a module, within a while loop that goes by what the training comes to."""

import random
import time
from collections import Counter

import torch
from torch.utils.data import DataLoader, TensorDataset

words = Counter()
random.seed(2)
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.arange(40.0).reshape(20, 2)), batch_size=2, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
running = 0.0
epoch = -1
since = time.monotonic
while running < 5e5 and words["batches"] < 40:
    epoch += 1
    best_of_epoch = None
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        running += loss.item()
        words["batches"] += 1
        best_of_epoch = min(best_of_epoch or loss.item(), loss.item())
        print(epoch, words["batches"], f"{running:.17g} {best_of_epoch:.17g}")
        if words["batches"] >= 35:
            break
    else:
        continue
    break
print("at the end", f"{loss.item():.17g}", running)

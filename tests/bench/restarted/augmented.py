"""Augmentation by NumPy's and Python's random numbers in the training's own process; a loader with a generator."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        row = torch.sin(torch.arange(32.0) * (index + 1)) + 0.1 * torch.from_numpy(np.random.randn(32)).float()
        return row.roll(random.randrange(32)), row.sum().unsqueeze(0)


torch.set_num_threads(1)
torch.manual_seed(6)
np.random.seed(6)
random.seed(6)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 15, 2)
loader = DataLoader(Noisy(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(60))
for _epoch in range(4):
    for _step, (batch, target) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        print("batch", batch.sum().item().hex(), rate.hex(), loss.item().hex(), flush=True)

"""Ranks of DDP with uneven inputs: rank 0 has batches until PATH.stop is there, and every other one has four.

joined.py PATH: each writes its losses to PATH.RANK.
"""

import os
import select
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset

PACE_S = 0.02
path = sys.argv[1]
distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn(4096 if rank == 0 else 4, 64))
with Path(f"{path}.{rank}").open("w", buffering=1) as losses, model.join():
    for (batch,) in DataLoader(data, batch_size=1):
        if Path(f"{path}.stop").exists():
            break
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.write(f"{float(loss.detach()).hex()}\n")
        select.select([], [], [], PACE_S)
os._exit(0)  # some processes with gloo abort while the interpreter ends, or hang (torch 2.13)

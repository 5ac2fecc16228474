"""A training that can be restarted: each start writes to a file, and can be ordered to fail or to wait there."""

import os
import signal
import sys

with open("starts", "a", encoding="ascii") as starts:
    told = [os.environ.get(name, "-") for name in ("HEGM_GPU", "EXTRA")]
    seen = [os.environ.get(name, "-") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")]
    print(os.getpid(), *told, sys.prefix.replace(" ", "-"), *seen, file=starts)
if os.environ.get("BROKEN"):
    sys.exit(5)
if os.environ.get("HELD"):
    with open("entered", "w", encoding="ascii") as entered:
        entered.write(str(os.getpid()))
    os.replace("entered", "waits")
    with open(os.environ["HELD"], "rb") as gate:
        gate.read()

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=4, shuffle=True)
for epoch in range(100):
    for index, (batch,) in enumerate(loader):
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if os.environ.get("HANGS_AT") == str(epoch) and not os.path.exists("hangs"):
            with open("hangs", "w", encoding="ascii"):
                pass
            signal.pause()
        if os.environ.get("FAILS_AT") == str(epoch) and index == 5:
            sys.exit(7)
        print("step", epoch, index, loss.item().hex(), batch.sum().item().hex(), flush=True)
        if os.environ.get("LOG"):
            with open(os.environ["LOG"], "a", encoding="ascii") as log:
                print("step", epoch, index, loss.item().hex(), batch.sum().item().hex(), file=log)

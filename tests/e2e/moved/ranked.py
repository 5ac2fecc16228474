"""Two ranks that average their gradients over gloo, each with random numbers of its own, epoch by epoch."""

import os
import random

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

distributed.init_process_group("gloo")
rank = distributed.get_rank()
with open("starts", "a", encoding="ascii") as starts:
    told = [os.environ.get(name, "-") for name in ("HEGM_GPU", "EXTRA")]
    print(f"{os.getpid()} {rank} {' '.join(told)}\n", end="", file=starts)
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
torch.manual_seed(rank)
random.seed(rank)
sums = []
for epoch in range(40):
    sampler.set_epoch(epoch)
    for index, (batch, target) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(batch + random.random()), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers = f"{loss.item().hex()} {batch.sum().item().hex()} {schedule.get_last_lr()[0]}"
        for work, total in sums:  # the losses of the batch before, which are summed while this one is computed
            work.wait()
            numbers = f"{numbers} {total.item().hex()}"
        total = loss.detach().clone()
        sums[:] = [(distributed.all_reduce(total, async_op=True), total)]
        os.write(1, f"step {rank} {epoch} {index} {numbers}\n".encode())  # at once: both write to one pipe
        if os.environ.get("FALLS") == str(rank):
            if "AGAIN" in os.environ and not os.path.exists("told"):
                os.mkfifo("told")
            os._exit(7)
        if rank == 1 and os.path.exists("told"):  # it falls once more where it was, when it is told to
            os.rename("told", "fell")
            with open("fell", "rb") as told:
                told.read()
            os._exit(7)
    schedule.step()
distributed.destroy_process_group()
# Some processes with gloo abort at interpreter exit, with or without a move.
os._exit(0)

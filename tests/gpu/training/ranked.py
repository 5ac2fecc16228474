"""Ranks that train on a GPU each and know nothing of hegm: ranked.py KIND STEPS GIB PATH [pace=S] [WORD...]

KIND is ddp or fsdp. Each rank writes its process and then each loss, bit for bit, into PATH.RANK. With `device-id` NCCL
connects its ranks at once; with `groups` the losses are summed in a group of their own; with `views` DDP keeps no
second copy of the gradients. Without a GPU it is gloo.
"""

import os
import select
import sys

import torch
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset

kind, steps, path = sys.argv[1], int(sys.argv[2]), sys.argv[4]
settings = dict(word.split("=") for word in sys.argv[5:] if "=" in word)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if "device-id" in sys.argv else None)
# Weights, gradients and two moments, of four bytes each; FSDP has each rank keep its share of them.
WIDE = 4096 if on_gpu else 64
shares = ranks if kind == "fsdp" else 1
depth = max(2, int(float(sys.argv[3]) * (1 << 30) * shares) // (WIDE * WIDE * 16)) if on_gpu else 2
torch.manual_seed(3)
with device:
    body = [module for _ in range(depth) for module in (torch.nn.Linear(WIDE, WIDE), torch.nn.ReLU())]
    model = torch.nn.Sequential(*body, torch.nn.Linear(WIDE, 8))
if kind == "ddp":
    trained = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[device.index] if on_gpu else None, gradient_as_bucket_view="views" in sys.argv
    )
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    trained = fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
own = distributed.new_group(list(range(ranks))) if "groups" in sys.argv else None
data = torch.randn(512, WIDE, generator=torch.Generator().manual_seed(100 + rank))
done = 0
with open(f"{path}.{rank}", "w") as said:
    print(os.getpid(), file=said, flush=True)
    while done < steps:
        for (batch,) in DataLoader(TensorDataset(data), batch_size=16):
            loss = trained(batch.to(device)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told = loss.detach().clone()
            if own is not None:
                distributed.all_reduce(told, group=own)
            print(float(told).hex(), file=said, flush=True)
            done += 1
            select.select([], [], [], float(settings.get("pace", "0")))
            if done == steps:
                break
distributed.barrier()
os._exit(0)  # some processes with gloo abort while the interpreter ends (torch 2.13)

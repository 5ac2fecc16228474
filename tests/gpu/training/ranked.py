"""Ranks that train on a GPU each and know nothing of hegm: ranked.py KIND STEPS GIB PATH [pace=S] [WORD...]

KIND is ddp, fsdp, tensor (tensor parallel) or pipeline. Each rank writes its process and then each loss, bit for bit,
into PATH.RANK. With `device-id` NCCL connects its ranks at once; with `groups` the losses are summed in a group of
their own; with `views` DDP keeps no second copy of the gradients; with `both` the backends are `cpu:gloo,cuda:nccl`.
With `fed` only rank 0 has a loader; with `evaluates` it alone reads another loader after each third step. With `times`
PATH.times gets the seconds of each step of rank 0. Without a GPU the backend is gloo.
"""

import itertools
import json
import os
import select
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

kind, steps, path = sys.argv[1], int(sys.argv[2]), sys.argv[4]
settings = dict(word.split("=") for word in sys.argv[5:] if "=" in word)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
backend = "nccl" if on_gpu else "gloo"
if "both" in sys.argv:
    backend = f"cpu:gloo,cuda:{backend}"
distributed.init_process_group(backend, device_id=device if "device-id" in sys.argv else None)
# Weights, gradients and two moments, of four bytes each; all but DDP have each rank keep its share of them.
WIDE = 4096 if on_gpu else 64
shares = 1 if kind == "ddp" else ranks
depth = max(2, int(float(sys.argv[3]) * (1 << 30) * shares) // (WIDE * WIDE * 16)) if on_gpu else 2
if kind == "tensor":
    depth |= 1  # with the last layer, a whole number of pairs
torch.manual_seed(3)


def built() -> Any:
    """The parameters, and what makes the gradients of one batch and returns its loss."""
    mesh = None if kind == "ddp" else init_device_mesh(device.type, (ranks,))
    if kind == "pipeline":
        return in_stages(mesh)
    with device:
        body = [module for _ in range(depth) for module in (torch.nn.Linear(WIDE, WIDE), torch.nn.ReLU())]
        model = torch.nn.Sequential(*body, torch.nn.Linear(WIDE, 8))
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if on_gpu else None, gradient_as_bucket_view="views" in sys.argv
        )
    elif kind == "tensor":
        styles = (ColwiseParallel, RowwiseParallel)
        plan = {str(2 * place): styles[place % 2]() for place in range(depth + 1)}
        model = parallelize_module(model, mesh, plan)
    else:
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh)

    def at_once(batch: Any) -> Any:
        loss = model(batch).pow(2).mean()
        loss.backward()
        return loss.detach()

    return model.parameters(), at_once


def in_stages(mesh: Any) -> Any:
    """Each rank has one of the stages, and a batch goes through them in four parts."""
    with device:
        blocks = [torch.nn.Linear(WIDE, WIDE) for _ in range(depth)]
    own_blocks = torch.nn.Sequential(*blocks[rank * depth // ranks : (rank + 1) * depth // ranks])
    stage = PipelineStage(own_blocks, rank, ranks, device, group=mesh.get_group())
    schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)

    def through_stages(batch: Any) -> Any:
        losses: list[Any] = []
        if rank == 0:
            schedule.step(batch)
        elif rank == ranks - 1:
            schedule.step(target=batch, losses=losses)
        else:
            schedule.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)

    return own_blocks.parameters(), through_stages


parameters, step = built()
optimizer = torch.optim.AdamW(parameters, lr=1e-4)
own = distributed.new_group(list(range(ranks))) if "groups" in sys.argv else None
# Ranks that share a tensor, or a batch by its stages, have the same batches.
shard = rank if kind in ("ddp", "fsdp") else 0
data = TensorDataset(torch.randn(512, WIDE, generator=torch.Generator().manual_seed(100 + shard)))
loader = DataLoader(data, batch_size=16)
if "fed" in sys.argv and rank:
    loader = [(data.tensors[0][:16],)] * len(loader)
done, ends = 0, []
with open(f"{path}.{rank}", "w") as losses:
    print(os.getpid(), file=losses, flush=True)
    while done < steps:
        for (batch,) in loader:
            optimizer.zero_grad()
            loss = step(batch.to(device)).clone()
            optimizer.step()
            if own is not None:
                distributed.all_reduce(loss, group=own)
            print(float(loss).hex(), file=losses, flush=True)
            done += 1
            ends.append(monotonic())
            if "evaluates" in sys.argv and rank == 0 and done % 3 == 0:
                list(DataLoader(data, batch_size=128))
            select.select([], [], [], float(settings.get("pace", "0")))
            if done == steps:
                break
if "times" in sys.argv and rank == 0:
    Path(f"{path}.times").write_text(json.dumps([later - end for end, later in itertools.pairwise(ends)]))
distributed.barrier()
os._exit(0)  # some processes with gloo abort while the interpreter ends (torch 2.13)

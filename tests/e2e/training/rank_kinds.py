"""Ranks that train over gloo in one of several kinds of groups: rank_kinds.py KIND PATH [STEPS] [WORD...]

KIND is ddp, fsdp (FSDP2), tensor, pipeline or grid: two by two ranks, FSDP2 in one dimension of the mesh and tensor
parallel in the other; or chain: each rank sends to the next with `isend`, and waits for that in its next step. Each
rank writes its losses, bit for bit, to PATH.RANK, until so many steps are made, or PATH.stop is there. With `groups`
the losses are summed in a group of their own; with `both` the backends are `cpu:gloo,cuda:nccl`, or gloo for both if
this PyTorch has no NCCL; with `eager` all groups communicate before the first step. With `fed` only rank 0 has a
loader; with `evaluates` it alone reads another loader after each third step. With `averaged` the loss is that of an
average of the weights, with `recomputed` the activations are computed again for the backward pass, with `recurrent`
the model has an LSTM, and with `early` a rank of a chain receives for its next step.
"""

import os
import select
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

PACE_S = 0.02  # minimum duration of a step while hegmd does not count steps
kind, path, words = sys.argv[1], sys.argv[2], sys.argv[3:]
steps = int(words[0]) if words and words[0].isdecimal() else -1
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
nccl = "nccl" if distributed.is_nccl_available() else "gloo"
distributed.init_process_group(f"cpu:gloo,cuda:{nccl}" if "both" in words else "gloo")
own = distributed.new_group(list(range(ranks))) if "groups" in words else None
torch.manual_seed(3)


class Recurrent(torch.nn.Module):
    """A sequence of 4 by 8 values for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.last = torch.nn.Linear(16, 8)

    def forward(self, batch):
        return self.last(self.lstm(batch.view(-1, 4, 8))[0][:, -1])


class Recomputed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)

    def forward(self, batch):
        from torch.utils.checkpoint import checkpoint

        hidden = checkpoint(lambda x: torch.nn.functional.dropout(self.first(x), 0.2), batch, use_reentrant=False)
        return self.last(hidden)


def layers() -> torch.nn.Module:
    if "recurrent" in words:
        return Recurrent()
    if "recomputed" in words:
        return Recomputed()
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


def sharded(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_parts(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def in_stages(mesh):
    """Each rank has one of the stages, and a batch goes through them in four parts."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    blocks = [torch.nn.Linear(32, 32) for _ in range(ranks)]
    stage = PipelineStage(blocks[rank], rank, ranks, torch.device("cpu"), group=mesh.get_group())
    return blocks[rank], ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)


def in_chain():
    """Each rank trains on its batch and what the rank before it has sent."""
    model, pending = torch.nn.Linear(32, 32), {}

    def received():
        found = torch.zeros(16, 32)
        return found, distributed.irecv(found, rank - 1) if rank else None

    def chained(batch):
        found, work = pending.pop("in") if "in" in pending else received()
        if work is not None:
            work.wait()
        out = model(batch + found)
        if "out" in pending:
            pending.pop("out")[1].wait()
        if rank < ranks - 1:
            sent = out.detach().clone()
            pending["out"] = sent, distributed.isend(sent, rank + 1)
        if "early" in words:
            pending["in"] = received()
        loss = out.pow(2).mean()
        loss.backward()
        return loss

    return model.parameters(), chained


def trained():
    """The parameters, and what makes one step and returns its loss."""
    if kind == "pipeline":
        part, schedule = in_stages(init_device_mesh("cpu", (ranks,)))

        def through_stages(batch):
            found: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(batch)
            elif rank == ranks - 1:
                schedule.step(target=batch, losses=found)
            else:
                schedule.step()
            return torch.stack(found).mean() if found else torch.zeros(())

        return part.parameters(), through_stages
    if kind == "chain":
        return in_chain()
    if kind == "grid":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        model = sharded(in_parts(layers(), mesh["tensor"]), mesh["data"])
    elif kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(layers())
    else:
        mesh = init_device_mesh("cpu", (ranks,))
        model = (sharded if kind == "fsdp" else in_parts)(layers(), mesh)

    average = torch.optim.swa_utils.AveragedModel(model.module, use_buffers=True) if "averaged" in words else None

    def at_once(batch):
        loss = model(batch).pow(2).mean()
        loss.backward()
        if average is not None:
            average.update_parameters(model.module)
            return average(batch).pow(2).mean()
        return loss

    return model.parameters(), at_once


def is_over():
    """Return whether they have the command to end; the same answer for all ranks, at the same step. Takes a moment."""
    select.select([], [], [], PACE_S)
    shared = torch.tensor([float(Path(f"{path}.stop").exists())])
    distributed.all_reduce(shared)
    return bool(shared)


parameters, step = trained()
optimizer = torch.optim.AdamW(parameters, lr=1e-3)
# Ranks that share a tensor, or a batch by its stages, have the same batches.
shard = rank if kind in ("ddp", "fsdp") else rank // 2 if kind == "grid" else 0
data = TensorDataset(torch.randn(512, 32, generator=torch.Generator().manual_seed(100 + shard)))
if "eager" in words:
    for group in list(distributed.distributed_c10d._world.pg_map):
        distributed.barrier(group)
loader = DataLoader(data, batch_size=16)
if "fed" in words and rank:
    loader = [(data.tensors[0][:16],)] * len(loader)
done, goes_on = 0, True
with Path(f"{path}.{rank}").open("w", buffering=1) as losses:
    while goes_on:
        for (batch,) in loader:
            if not (goes_on := done != steps and not (steps < 0 and is_over())):
                break
            optimizer.zero_grad()
            loss = step(batch).detach().clone()
            optimizer.step()
            if own is not None:
                distributed.all_reduce(loss, group=own)
            losses.write(f"{float(loss).hex()}\n")
            done += 1
            if "evaluates" in words and rank == 0 and done % 3 == 0:
                list(DataLoader(data, batch_size=128))
os._exit(0)  # some processes with gloo abort while the interpreter ends, or hang (torch 2.13)

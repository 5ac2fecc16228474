"""Ranks that average their gradients over gloo; each prints its losses to a file of its own.

They continue for so many steps, or until the file PATH.stop is there for one of them.
"""

import contextlib
import os
import select
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PACE_S = 0.02  # minimum duration of a step


def is_over(path: str) -> bool:
    """Return whether they have the command to end; the same answer for all ranks, at the same step. Blocks here while a
    FIFO is open.
    """
    with contextlib.suppress(FileNotFoundError):  # also if the test removes it once the other rank has it open
        Path(f"{path}.hold").read_bytes()
    select.select([], [], [], PACE_S)
    shared = torch.tensor([float(Path(f"{path}.stop").exists())])
    distributed.all_reduce(shared)
    return bool(shared)


def halt(name: str, path: str) -> None:
    """Make that function of gloo wait, once, until a line arrives in that FIFO: a library that takes long."""
    real = getattr(distributed.ProcessGroupGloo, name)

    def call(*args: object) -> object:
        if Path(path).exists():
            with Path(path).open() as fifo:
                fifo.read(1)
            Path(path).unlink(missing_ok=True)
        return real(*args)

    setattr(distributed.ProcessGroupGloo, name, call)


def train(path: str, steps: int, halts_at: str = "") -> None:
    distributed.init_process_group("gloo")
    if distributed.get_rank() == 1 and halts_at:
        halt(halts_at, f"{path}.fifo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    layers = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(model.parameters())
    done = 0
    with Path(f"{path}.{distributed.get_rank()}").open("w", buffering=1) as losses:
        while done != steps:
            for batch, target in loader:
                if done == steps or (steps < 0 and is_over(path)):
                    steps = done
                    break
                loss = torch.nn.functional.mse_loss(model(batch), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.write(f"{float(loss.item()).hex()}\n")
                done += 1
    distributed.destroy_process_group()
    # About one in six processes with gloo aborts while the interpreter ends («terminate called without an active
    # exception», torch 2.13), also without a move; the output to compare is written by now. Some hang in the release of
    # the model: its reducer waits, with the interpreter's lock held, for a thread of gloo that wants it.
    os._exit(0)


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1, *sys.argv[3:])

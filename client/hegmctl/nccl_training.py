"""The two ranks that `hegmctl doctor --nccl` moves: nccl_training.py STEPS PATH, under torchrun.

They know nothing of hegmd. Each prints every loss bit for bit into PATH.RANK. With 0 STEPS they train until the file
PATH.stop is there, or for a quarter of an hour: hegmctl may have been killed. On GPUs they use NCCL, otherwise gloo.
The Python that is to be tried runs this by its path, so it imports nothing of hegmd.
"""

from __future__ import annotations

import os
import select
import sys
from importlib import import_module
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PACE_S, MAX_S = 0.02, 900.0
_WIDE = 256


def train(steps: int, path: str) -> None:
    """Train until the requested end; both ranks end after the same step."""
    torch: Any = import_module("torch")
    distributed: Any = import_module("torch.distributed")
    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    own_group = distributed.new_group(list(range(int(os.environ["WORLD_SIZE"]))))
    torch.manual_seed(3)
    with device:
        model = torch.nn.Sequential(torch.nn.Linear(_WIDE, _WIDE), torch.nn.ReLU(), torch.nn.Linear(_WIDE, 8))
    trained = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    done, until = 0, monotonic() + MAX_S
    with open(f"{path}.{rank}", "w", encoding="ascii") as file:
        for batch in _batches(rank):
            loss = trained(batch.to(device)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            is_over = not steps and (os.path.exists(f"{path}.stop") or monotonic() > until)
            state = torch.stack([loss.detach(), torch.tensor(float(is_over), device=device)])
            distributed.all_reduce(state, group=own_group)
            file.write(float(state[0]).hex() + "\n")
            file.flush()
            done += 1
            if done == steps or state[1]:
                break
            if not steps:
                select.select([], [], [], PACE_S)
    distributed.barrier()
    os._exit(0)  # some processes with gloo abort while the interpreter ends (torch 2.13)


def _batches(rank: int) -> Any:
    """Yield the same rows again and again, from a loader, whose batches are the boundaries."""
    torch: Any = import_module("torch")
    data: Any = import_module("torch.utils.data")
    rows = torch.randn(512, _WIDE, generator=torch.Generator().manual_seed(100 + rank))
    while True:
        for (batch,) in data.DataLoader(data.TensorDataset(rows), batch_size=16):
            yield batch


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2])

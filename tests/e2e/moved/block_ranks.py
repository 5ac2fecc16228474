"""A training in a block of `hegm.recovery`, which tells each rank's losses: `rank step loss`, one line a step.

Dropout, batch statistics, momentum and a schedule make each loss depend on all that a recovery has to bring back. The
arguments: steps, the soft limit in seconds, the backend, the width of the model, and the pause after a step in seconds.
"""

from __future__ import annotations

import os
import random
import select
import sys
from typing import Any

import torch

import hegm

STEPS, SOFT_LIMIT_S, BACKEND, WIDTH, PACE_S = [*sys.argv[1:], *("24", "5", "gloo", "64", "0")[len(sys.argv) - 1 :]]
device = torch.device("cpu")
if BACKEND == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)

torch.random.manual_seed(7)  # pyright: ignore[reportUnknownMemberType] - PyTorch does not say of what kind it is
random.seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(16, int(WIDTH)),
    torch.nn.BatchNorm1d(int(WIDTH)),
    torch.nn.Dropout(0.3),
    *[torch.nn.Linear(int(WIDTH), int(WIDTH)) for _ in range(4)],
    torch.nn.Linear(int(WIDTH), 1),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


class Loader:
    """Batches by number; `given` is what the recovery has restored of it."""

    given = 0

    def batch(self, rank: int) -> torch.Tensor:
        self.given += 1
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank + self.given)).to(device)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


loader = Loader()
recovery = hegm.recovery(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    extra={"loader": loader},
    soft_limit_s=float(SOFT_LIMIT_S),
    hard_limit_s=float(SOFT_LIMIT_S),
)


@recovery.block
def train(run: Any) -> None:
    run.init_process_group(BACKEND)
    ddp = run.ddp(model)
    for step in range(run.step, int(STEPS)):
        with run.step_guard() as guard:
            loss = ddp(loader.batch(run.rank)).pow(2).mean() * random.random()
            guard.backward(loss)
            os.write(1, f"{run.rank} {step} {loss.item():.17g}\n".encode())
            guard.commit()
        select.select([], [], [], float(PACE_S))
    with run.section("eval", limit=None):
        os.write(1, f"{run.rank} {STEPS} {sum(float(p.detach().sum()) for p in model.parameters()):.17g}\n".encode())


train()

"""A training in a block of `hegm.recovery`, which tells each rank's losses: `rank step loss`, one line a step.

Dropout, batch statistics, momentum and a schedule make each loss depend on all that a recovery has to bring back.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import torch

import hegm

STEPS, SOFT_LIMIT_S = int(sys.argv[1]), float(sys.argv[2])

torch.manual_seed(7)
random.seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64),
    torch.nn.BatchNorm1d(64),
    torch.nn.Dropout(0.3),
    *[torch.nn.Linear(64, 64) for _ in range(4)],
    torch.nn.Linear(64, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


class Loader:
    """Batches by number; `given` is what the recovery brings back of it."""

    given = 0

    def batch(self, rank: int) -> torch.Tensor:
        self.given += 1
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank + self.given))

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
    soft_limit_s=SOFT_LIMIT_S,
    hard_limit_s=SOFT_LIMIT_S,
)


@recovery.block
def train(run: Any) -> None:
    run.init_process_group("gloo")
    ddp = run.ddp(model)
    for step in range(run.step, STEPS):
        with run.step_guard() as guard:
            loss = ddp(loader.batch(run.rank)).pow(2).mean() * random.random()
            guard.backward(loss)
            os.write(1, f"{run.rank} {step} {loss.item():.17g}\n".encode())
            guard.commit()
    with run.section("eval", limit=None):
        os.write(1, f"{run.rank} {STEPS} {sum(float(p.detach().sum()) for p in model.parameters()):.17g}\n".encode())


train()

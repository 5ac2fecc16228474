"""A small training whose every line depends on all before it; ends when its input does, or after so many steps."""

import select
import sys

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, TensorDataset

PACE_S = 0.03  # what a step takes at least, as on a GPU, so that many of these share a core


def train(seed: int, steps: int, *, paced: bool) -> None:
    torch.manual_seed(seed)
    rows = TensorDataset(torch.randn(64, 16))
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 128), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 1)
    )
    ballast = torch.nn.Parameter(torch.randn(64, 1024))
    optimizer = torch.optim.AdamW([*model.parameters(), ballast], lr=1e-3)
    done = 0
    while True:
        for (batch,) in DataLoader(rows, batch_size=8, shuffle=True):
            if done == steps or (paced and select.select([sys.stdin], [], [], PACE_S)[0]):
                return
            loss = model(batch).pow(2).mean() + (ballast[done % 64] * ballast[(done * 7) % 64]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(float(loss.item()).hex(), flush=True)
            done += 1


if __name__ == "__main__":
    if sys.argv[1] == "undisturbed":
        train(int(sys.argv[2]), int(sys.argv[3]), paced=False)
    else:
        train(int(sys.argv[1]), -1, paced=True)

"""A training that lasts until its input ends, or so many steps: shuffle, dropout, AdamW, loader workers."""

import select
import sys

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, Dataset

PACE_S = 0.03  # minimum duration of a step, as on a GPU: commands find it training


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The loader's worker makes each row on request."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.sin(torch.arange(256.0) * (index + 1)) + 0.1 * torch.randn(256)
        return row, row.sum().unsqueeze(0)


def train(loader_workers: int, steps: int) -> None:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(512, 512)]
    model = torch.nn.Sequential(*layers, torch.nn.GELU(), torch.nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(
        Rows(), batch_size=32, shuffle=True, num_workers=loader_workers, persistent_workers=loader_workers > 0
    )
    done = 0
    while True:
        for batch, target in loader:
            if done == steps or (steps < 0 and select.select([sys.stdin], [], [], PACE_S)[0]):
                return
            loss = torch.nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(float(loss.item()).hex(), flush=True)
            done += 1


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1)

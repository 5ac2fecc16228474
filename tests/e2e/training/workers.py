"""Two persistent loader workers with random augmentation, gradient accumulation and autocast."""

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.randn(32) * 0.1 + index / 400, torch.tensor([index / 400])


def main():
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    for _epoch in range(3):
        for step, (batch, target) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(batch), target)
            (loss / 4).backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            print(loss.item().hex(), flush=True)


if __name__ == "__main__":
    main()

"""Evaluation and a checkpoint after each epoch; schedules of both kinds, a gradient scaler, averaged weights."""

import sys
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        total = sum(model(rows).pow(2).sum().item() for (rows,) in loader)
    model.train()
    return total


def main():
    torch.manual_seed(9)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [5])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    averaged = AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=5)
    shuffler = torch.Generator().manual_seed(77)
    loader = DataLoader(
        TensorDataset(torch.randn(40, 8)), batch_size=4, shuffle=True, generator=shuffler, drop_last=True
    )
    held_out = TensorDataset(torch.randn(24, 8))
    held_out = DataLoader(held_out, batch_size=6, shuffle=True, num_workers=1, persistent_workers=True)
    for epoch in range(4):
        for index, (rows,) in enumerate(loader, 1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(rows).float() - rows.sum(1, keepdim=True)).pow(2).mean() / 2
            scaler.scale(loss).backward()
            if index % 2 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
                averaged.update_parameters(model)
            print(
                epoch, index, loss.item().hex(), optimizer.param_groups[0]["lr"].hex(), scaler.get_scale(), flush=True
            )
        total = evaluate(averaged, held_out)
        plateau.step(total)
        print("evaluated", epoch, total.hex(), flush=True)
        torch.save(model.state_dict(), Path(sys.argv[1]) / f"epoch{epoch}.pt")


if __name__ == "__main__":
    main()

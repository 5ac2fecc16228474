"""Mixed precision with a gradient scaler, accumulation over three batches, and files: a log, a table, checkpoints."""

import csv
import json
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Made up and distorted by the loader's workers, whose random numbers belong to the training."""

    def __len__(self):
        return 240

    def __getitem__(self, index):
        row = torch.sin(torch.arange(48.0) * (index + 1)) + 0.1 * torch.randn(48)
        return row.roll(int(torch.randint(0, 48, ()))), row.sum().unsqueeze(0)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = torch.nn.Sequential(
        torch.nn.Linear(48, 128), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=20)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    with open("losses.csv", "w", newline="") as table, open("log.jsonl", "w") as log:
        rows = csv.writer(table)
        for epoch in range(6):
            seen = []
            for index, (batch, target) in enumerate(loader):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = torch.nn.functional.mse_loss(model(batch), target)
                scaler.scale(loss / 3).backward()
                if index % 3 == 2:
                    scaler.unscale_(optimizer)
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    print(json.dumps({"epoch": epoch, "norm": norm.item(), "scale": scaler.get_scale()}), file=log)
                rows.writerow([epoch, index, loss.item().hex()])
                seen.append(loss.detach())
                print("step", epoch, index, loss.item().hex(), scaler.get_scale(), flush=True)
            np.save(f"losses-{epoch}.npy", torch.stack(seen).numpy())
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            torch.save(state, "checkpoint.tmp")
            Path("checkpoint.tmp").rename(f"checkpoint-{epoch % 3}.pt")


if __name__ == "__main__":
    main()

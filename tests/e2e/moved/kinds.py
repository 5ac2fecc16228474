"""One of several kinds of loop, by its name. Each makes at most 400 steps, and ends once the file exists."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

kind, stop = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(11)
WIDTH = 128
data = TensorDataset(torch.randn(203, WIDTH), torch.randn(203, 1))
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2 if kind == "workers" else 0)


class Recurrent(torch.nn.Module):
    """An LSTM over the input in pieces, whose state goes from batch to batch."""

    def __init__(self):
        super().__init__()
        self.cell = torch.nn.LSTM(16, 256, 2, batch_first=True)
        self.head = torch.nn.Linear(256, 1)
        self.state = None

    def forward(self, rows):
        out, state = self.cell(rows.reshape(len(rows), 8, 16), self.state if len(rows) == 8 else None)
        self.state = tuple(part.detach() for part in state) if len(rows) == 8 else None
        return self.head(out[:, -1])


dense = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, 1024), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(1024, 1)
)
model = Recurrent() if kind == "lstm" else dense
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7, enabled=kind == "amp")


def batches():
    """The batches of all epochs, from a generator that keeps its own place."""
    while True:
        yield from loader


def uneven():
    """Batches of 1 to 40 rows."""
    at = 0
    while True:
        count = int(torch.randint(1, 41, ()))
        rows = torch.arange(at, at + count) % len(data)
        at += count
        yield data.tensors[0][rows], data.tensors[1][rows]


every = 4 if kind == "accumulation" else 1
for step, (rows, targets) in enumerate(uneven() if kind == "uneven" else batches()):
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "amp"):
        loss = torch.nn.functional.mse_loss(model(rows).float(), targets) / every
    scaler.scale(loss).backward()
    if (step + 1) % every == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print("step", step, loss.item().hex(), flush=True)
    if step == 400 or stop.exists():
        break

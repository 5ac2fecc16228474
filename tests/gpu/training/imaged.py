"""A training that is written into images: imaged.py FOLDER SIZE_MIB STEPS PACE_S [workers]; it knows nothing of hegm.

Waits, with its imports behind it, for FOLDER/go. Appends every loss to FOLDER/lines, bit for bit, and after some steps
digests of all that it holds; to FOLDER/pauses when a pause ended and how long it was, both by the time of day: CRIU has
what it restores in a time namespace, where the monotonic clock goes on as if nothing had been. Its output is in files,
because a pipe leads to nobody once it has come back from an image.
"""

import os
import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

folder, size_mib, steps, pace_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
WORKERS = 2 * ("workers" in sys.argv)
PIECES, DIGEST_EVERY, PAUSE_S = 64, 20, 0.15
pause = threading.Event()
while not os.path.exists(f"{folder}/go"):
    pause.wait(0.02)
torch.manual_seed(7)
gpu = torch.device("cuda:0")
held = [torch.randint(-(1 << 62), 1 << 62, ((size_mib << 17) // PIECES,), device=gpu) for _ in range(PIECES)]
data = TensorDataset(torch.randn(4096, 512), torch.randint(0, 10, (4096,)))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=WORKERS, persistent_workers=bool(WORKERS))
model = torch.nn.Sequential(
    torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(1024, 10)
).to(gpu)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def digest():
    whole = [int(piece.sum().item()) for piece in held]
    return f"digest {sum(whole)} {sum(float(value.detach().double().sum()) for value in model.parameters()).hex()}"


count, last = 0, time.time()
with open(f"{folder}/lines", "a", buffering=1) as lines, open(f"{folder}/pauses", "a", buffering=1) as pauses:
    while count < steps:
        for batch in loader:
            inputs, labels = (part.to(gpu) for part in batch)
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            count += 1
            lines.write(f"{count} {loss.item().hex()}\n")
            now = time.time()
            if now - last > pace_s + PAUSE_S:
                pauses.write(f"{now} {now - last - pace_s}\n")
            if count % DIGEST_EVERY == 0:
                lines.write(f"{digest()}\n")
            if count == steps:
                break
            last = now if count % DIGEST_EVERY else time.time()  # a digest is no pause
            pause.wait(max(0.0, last + pace_s - time.time()))

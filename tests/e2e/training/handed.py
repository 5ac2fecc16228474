"""All that an image has to bring back: shuffle, dropout, a schedule, loader workers, a thread, a child, an open file.

handed.py FOLDER STEPS: goes slowly for as long as FOLDER/slow is there, and appends every loss to FOLDER/losses.
It goes the slower the nearer its end is: on a busy machine, it was over before the third command of a test.
"""

import os
import subprocess
import sys
import threading

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, TensorDataset

folder, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(4)
inputs = torch.randn(240, 32)
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
loader = DataLoader(
    TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    batch_size=4,
    shuffle=True,
    num_workers=int(os.environ.get("LOADER_WORKERS", "0")),
    persistent_workers="LOADER_WORKERS" in os.environ,
)
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
asked, answered, squares = threading.Semaphore(0), threading.Semaphore(0), []
pace = threading.Event()


def square():
    while asked.acquire():
        squares.append(len(squares) ** 2)
        answered.release()


threading.Thread(target=square, daemon=True).start()
done = 0
with open(f"{folder}/losses", "a", buffering=1) as losses:
    while done < steps:
        for batch, target in loader:
            loss = torch.nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            done += 1
            child.stdin.write(f"{loss.item().hex()}\n")
            child.stdin.flush()
            asked.release()
            answered.acquire()
            losses.write(f"{done} {child.stdout.readline().strip()} {squares[-1]}\n")
            if os.path.exists(f"{folder}/slow"):
                pace.wait(0.02 * steps / max(1, steps - done))
            if done == steps:
                break
    losses.write("end\n")
print(f"{done} steps", flush=True)
child.kill()  # not by the end of its input, which forked loader workers have open as well
child.wait()

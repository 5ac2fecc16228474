"""The training of adamw.py that saves itself, for torchrun to start again: saved.py GIB FILE EVERY_S

Saves model, optimizer and step with torch.save every so many seconds, and loads them at its start. Prints the process,
the step and the loss, bit for bit, after each step, and how long each save took. Knows nothing of hegm.
"""

import os
import sys
import time

import torch

size_bytes, path, every_s = int(float(sys.argv[1]) * (1 << 30)), sys.argv[2], float(sys.argv[3])
WIDE = 4096 if size_bytes >= 1 << 30 else 256
layers = max(1, size_bytes // (WIDE * WIDE * 4 * 3))
torch.manual_seed(7)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
with torch.device(device):
    body = [module for _ in range(layers) for module in (torch.nn.Linear(WIDE, WIDE), torch.nn.ReLU())]
    model = torch.nn.Sequential(*body, torch.nn.Linear(WIDE, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
examples = torch.randn(2048, WIDE)
labels = torch.randint(0, 10, (2048,))
step = 0
if os.path.exists(path):
    saved = torch.load(path, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    del saved
saved_at = time.monotonic()
while True:
    chosen = torch.randint(0, 2048, (16,), generator=torch.Generator().manual_seed(step))
    loss = torch.nn.functional.cross_entropy(model(examples[chosen].to(device)), labels[chosen].to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print("step", os.getpid(), step, float(loss).hex(), flush=True)
    if time.monotonic() - saved_at > every_s:
        began = time.monotonic()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + ".new")
        os.replace(path + ".new", path)
        saved_at = time.monotonic()
        print("saved", os.getpid(), step, saved_at - began, flush=True)

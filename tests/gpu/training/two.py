"""A training on two GPUs of one process, with copies between them; every loss is printed bit for bit.

    python two.py STEPS PAD_MIB [layout] [pace=SECONDS] [digest=STEPS]

PAD_MIB of random bits ride along on each GPU, summed in a line after so many steps. With `layout` copies between the
GPUs change type and layout too, which PyTorch does by a kernel that reads the other GPU: after a move that is likely to
fail.
"""

import sys
import threading

import torch

steps, pad_mib, traits = int(sys.argv[1]), int(sys.argv[2]), set(sys.argv[3:])
settings = dict(trait.split("=") for trait in traits if "=" in trait)
pace_s, digest_every = float(settings.get("pace", 0.0)), int(settings.get("digest", steps))
torch.manual_seed(7)
one, other = torch.device("cuda:0"), torch.device("cuda:1")
pads = [torch.randint(-(1 << 62), 1 << 62, (pad_mib << 17,), device=gpu) for gpu in (one, other)]
below = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU()).to(one)
above = torch.nn.Linear(1024, 10).to(other)
optimizer = torch.optim.AdamW([*below.parameters(), *above.parameters()], lr=1e-3)
pause = threading.Event()
for step in range(steps):
    inputs, labels = torch.randn(32, 512).to(one), torch.randint(0, 10, (32,)).to(other)
    middle = below(inputs)
    there = middle.t().to(other, torch.float64).t().float() if "layout" in traits else middle.to(other)
    loss = torch.nn.functional.cross_entropy(above(there), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", step, float(loss.item()).hex(), flush=True)
    if (step + 1) % digest_every == 0:
        print("digest", *[int(pad.sum().item()) for pad in pads], flush=True)
    pause.wait(pace_s)

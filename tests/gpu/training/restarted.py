"""A training that is restarted: restarted.py STEPS [TRAIT...]; it knows nothing of hegm.

Prints for each step its number, the device's kind, digests of all weights and moments before and after it, what was in
the batch, and the loss, in full. Traits: `dropout` and `noise` draw random numbers on the device, `amp` scales losses,
`compiled` goes through torch.compile, `fused` has one kernel for the optimizer; `pace=S` waits after each step.
"""

import hashlib
import sys
import threading

import torch
from torch.utils.data import DataLoader, TensorDataset

steps, traits = int(sys.argv[1]), sys.argv[2:]
pace_s = max([0.0, *(float(trait[5:]) for trait in traits if trait.startswith("pace="))])
pause = threading.Event()
kind = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(kind)
torch.manual_seed(11)
torch.use_deterministic_algorithms(mode=True, warn_only=True)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.2 if "dropout" in traits else 0.0),
    torch.nn.Linear(256, 256),
    torch.nn.BatchNorm1d(256),
    torch.nn.Linear(256, 1),
).to(device)
trained = torch.compile(model, backend="inductor" if kind == "cuda" else "aot_eager") if "compiled" in traits else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused="fused" in traits or None)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=25, gamma=0.9)
scaler = torch.amp.GradScaler(kind, enabled="amp" in traits, init_scale=256.0, growth_interval=7)
narrow = torch.float16 if kind == "cuda" else torch.bfloat16
noise = torch.Generator(device=device)
noise.manual_seed(5)
data = torch.randn(512, 64)
loader = DataLoader(TensorDataset(data, data.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)


def digest() -> str:
    """Of all weights, buffers and moments, bit for bit."""
    found = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def step(inputs: torch.Tensor, wanted: torch.Tensor) -> float:
    with torch.autocast(kind, dtype=narrow, enabled="amp" in traits):
        loss = torch.nn.functional.mse_loss(trained(inputs), wanted)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    return loss.item()


for epoch in range(1 + steps // len(loader)):
    for number, (inputs, wanted) in enumerate(loader):
        before = digest()
        there = inputs.to(device)
        if "noise" in traits:
            there = there + 0.1 * torch.randn(there.shape, generator=noise, device=device)
        loss = step(there, wanted.to(device))
        at = epoch * len(loader) + number
        print("step", at, kind, before, digest(), inputs.double().sum().item().hex(), loss.hex(), flush=True)
        pause.wait(pace_s)

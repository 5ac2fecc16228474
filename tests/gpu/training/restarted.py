"""A training that is restarted: restarted.py STEPS [TRAIT...]; it knows nothing of hegm.

Prints for each step its number, the device's kind, digests of all weights and moments before and after it, what was in
the batch, and the loss, in full. Traits: `dropout` and `noise` draw random numbers on the device, `amp` scales losses,
`compiled` goes through torch.compile, `fused` has one kernel for the optimizer, `two` has the second half of the model
on a second GPU, with random numbers and variables of its own there; `pace=S` waits after each step.
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
device = other = torch.device(kind)
if "two" in traits and kind == "cuda":
    device, other = torch.device("cuda:0"), torch.device("cuda:1")
    uuids = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in (device, other)]
    print("on", *uuids, flush=True)
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
for layer in list(model)[3:] if other != device else ():
    layer.to(other)


class Spread(torch.nn.Module):
    """The model, which begins on one GPU and ends on another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Go to the other GPU in the middle, and draw random numbers there."""
        middle = torch.nn.functional.dropout(self.layers[:3](inputs).to(other), 0.1)
        return self.layers[3:](middle)


whole = Spread() if "two" in traits else model
trained = torch.compile(whole, backend="inductor" if kind == "cuda" else "aot_eager") if "compiled" in traits else whole
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused="fused" in traits or None)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=25, gamma=0.9)
scaler = torch.amp.GradScaler(kind, enabled="amp" in traits, init_scale=256.0, growth_interval=7)
narrow = torch.float16 if kind == "cuda" else torch.bfloat16
noise = torch.Generator(device=device)
noise.manual_seed(5)
beside = torch.Generator(device=other)
beside.manual_seed(6)
# They change in the loop: one stays on the second GPU, and the other goes from one GPU to the other at each step.
mean, wanderer = torch.zeros(1, device=other), torch.zeros(1, device=device)
data = torch.randn(512, 64)
loader = DataLoader(TensorDataset(data, data.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)


def digest() -> str:
    """Return a digest of all weights, buffers, moments and variables; on two GPUs, also of the device of each."""
    found = hashlib.sha256()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    for tensor in [*model.state_dict().values(), *moments, mean, wanderer]:
        found.update(str(tensor.device).encode() if "two" in traits else b"")
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
        if "two" in traits:
            mean = 0.9 * mean + torch.randn(1, generator=beside, device=other)
            wanderer = (wanderer + mean.to(wanderer.device)).to(other if wanderer.device == device else device)
            there = there + 0.01 * wanderer.to(device)
        loss = step(there, wanted.to(other))
        at = epoch * len(loader) + number
        print("step", at, kind, before, digest(), inputs.double().sum().item().hex(), loss.hex(), flush=True)
        pause.wait(pace_s)

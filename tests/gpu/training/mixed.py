"""A training on one GPU that knows nothing of hegm; every loss is printed bit for bit, and digests of all of it.

    python mixed.py STEPS PAD_MIB [amp] [streams] [small] [ema] [compiled] [graph] [workers] [single]
                                  [pace=SECONDS] [digest=STEPS]

PAD_MIB of tensors of random bits ride along and are folded into the digest, so that bytes which the losses never see
are proved too; `single` makes one tensor of them. `pace` is the least that a step takes, `digest` after how many steps
one is printed; there is one at the end anyway.
"""

import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

steps, pad_mib, traits = int(sys.argv[1]), int(sys.argv[2]), set(sys.argv[3:])
given = dict(trait.split("=") for trait in traits if "=" in trait)
pace_s, digest_every = float(given.get("pace", 0)), int(given.get("digest", steps))
torch.manual_seed(7)
gpu = torch.device("cuda:0")
torch.cuda.set_device(gpu)
whole_mib = pad_mib if "single" in traits else 4096
pads = [
    torch.randint(-(1 << 62), 1 << 62, (min(pad_mib - at, whole_mib) << 17,), device=gpu)
    for at in range(0, pad_mib, whole_mib)
]
small = [torch.randn(7 + index % 5, device=gpu) for index in range(1000)] if "small" in traits else []
views = [pads[0][3:100], pads[0][3:100].view(-1)] if pads else []
data = TensorDataset(torch.randn(4096, 512), torch.randint(0, 10, (4096,)))
with_workers = "workers" in traits
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2 * with_workers, persistent_workers=with_workers)
model = torch.nn.Sequential(
    torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(1024, 10)
).to(gpu)
step_of = torch.compile(model) if "compiled" in traits else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ema = [parameter.detach().clone() for parameter in model.parameters()] if "ema" in traits else []
scaler = torch.amp.GradScaler("cuda", enabled="amp" in traits)
side = torch.cuda.Stream() if "streams" in traits else None
beside = None
if side is not None:
    with torch.cuda.stream(side):
        beside = torch.zeros(1 << 20, device=gpu)
replay = None
if "graph" in traits:
    fixed_in, replay = torch.randn(64, 64, device=gpu), torch.cuda.CUDAGraph()
    warm = fixed_in @ fixed_in
    torch.cuda.synchronize()
    with torch.cuda.graph(replay):
        fixed_out = fixed_in @ fixed_in


def digest():
    torch.cuda.synchronize()
    whole = sum(int(pad.sum().item()) for pad in pads) + sum(int(view.sum().item()) for view in views)
    rest = [*model.parameters(), *ema, *([beside] if beside is not None else []), *([fixed_out] if replay else [])]
    rest += [torch.cat(small)] if small else []
    print("digest", whole, *[value.double().sum().item().hex() for value in rest], flush=True)


count = 0
pause, due = threading.Event(), time.monotonic()
while count < steps:
    for batch in loader:
        inputs, labels = (part.to(gpu) for part in batch)
        with torch.autocast("cuda", dtype=torch.float16, enabled="amp" in traits):
            loss = torch.nn.functional.cross_entropy(step_of(inputs), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for mean, parameter in zip(ema, model.parameters(), strict=False):
            mean.lerp_(parameter.detach(), 0.01)
        if side is not None and beside is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                beside.add_(loss.detach().float()).mul_(0.5)
        if replay is not None:
            fixed_in.mul_(0.999)
            replay.replay()
        for index, tensor in enumerate(small):
            if index % 100 == count % 100:
                tensor.add_(1)
        print(count, loss.item().hex(), flush=True)
        count += 1
        if count == steps:
            break
        if count % digest_every == 0:
            digest()
        due = max(time.monotonic(), due + pace_s)
        pause.wait(max(0.0, due - time.monotonic()))
digest()

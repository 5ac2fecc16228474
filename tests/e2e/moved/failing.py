"""A training of one or several ranks that fails once, as FAILS says: the kind, the phase, the ranks and the step.

Without the step it fails at the one in the file `fails-at`, once there is that. It ends at the step in the file
`ends-at`, or at STEPS. Its loop begins with the loop over its loader, and its batches are made by a process of their
own if CHILDREN says so. `failed-RANK` has the time of the failure, and `firsts` that of the first step of each process.
SIGUSR2 prints where its threads are.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import threading
import time

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset

faulthandler.register(signal.SIGUSR2)
DEVICE, BACKEND = os.environ.get("DEVICE", "cpu"), os.environ.get("BACKEND", "gloo")
STEPS = int(os.environ.get("STEPS", "100"))
KIND, PHASE, RANKS, *AT = os.environ.get("FAILS", "none none 0 0").split()
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
step, seen = 0, 0
with open("starts", "a", encoding="ascii") as starts:
    starts.write(f"{os.getpid()} {rank}\n")


def fail() -> None:  # noqa: PLR0912 - one for each kind
    if KIND == "exception":
        raise ValueError("as requested")
    if KIND == "memory":
        raise MemoryError("as requested")
    if KIND == "interrupt":
        raise KeyboardInterrupt
    if KIND == "exit":
        raise SystemExit(0)
    if KIND == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "segfault":
        ctypes.string_at(0)
    if KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if KIND == "oom":
        held = []
        while True:
            held.append(b"\1" * (16 << 20))
    if KIND == "sleep":
        signal.pause()
    if KIND == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if KIND == "socket":
        near, far = socket.socketpair()
        near.recv(1)
        far.close()
    if KIND == "device-assert":
        torch.zeros(1, device=DEVICE)[torch.tensor([5], device=DEVICE)].item()
    if KIND == "device-oom":
        torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)
    if KIND == "kernel":
        torch.cuda._sleep(1 << 40)  # some ten minutes
        torch.cuda.synchronize()
    if KIND == "c-call":
        ctypes.PyDLL(None).pause()  # it keeps the interpreter to itself


def step_in(name: str) -> int | None:
    try:
        with open(name, encoding="ascii") as file:
            return int(file.read())
    except FileNotFoundError:
        return None


def is_to_fail() -> bool:
    return step == (int(AT[0]) if AT else step_in("fails-at"))


def last_step() -> int:
    return step_in("ends-at") or STEPS


def note_first() -> None:
    global seen  # noqa: PLW0603 - a restored one is of another process
    if seen != os.getpid():
        seen = os.getpid()
        with open("firsts", "a", encoding="ascii") as firsts:
            firsts.write(f"{rank} {time.time()}\n")


def fails(phase: str) -> None:
    if phase != PHASE or str(rank) not in RANKS or not is_to_fail() or os.path.exists(f"failed-{rank}"):
        return
    with open(f"failed-{rank}", "w", encoding="ascii") as failed:
        failed.write(f"{time.time()}")
    if phase == "commit":
        next(model.parameters()).data.add_(1.0)  # a part of a step
    fail()


class Data(Dataset):
    def __len__(self) -> int:
        return 48 * world

    def __getitem__(self, index: int) -> torch.Tensor:
        fails("load")
        return torch.sin(torch.arange(8.0) * (index + 1))


if BACKEND == "nccl":
    DEVICE = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(DEVICE)
if world > 1:
    distributed.init_process_group(BACKEND)
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)).to(DEVICE)
if world > 1:
    # Without it DDP sums in another order after its first step, and a recovery begins with that step again.
    model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Data(), batch_size=4, shuffle=True, num_workers=int(os.environ.get("CHILDREN", "0")))
pace = threading.Event()
while step < last_step():
    for batch in loader:
        fails("forward")
        loss = model(batch.to(DEVICE)).pow(2).mean()
        optimizer.zero_grad()
        fails("backward")
        loss.backward()
        fails("commit")
        optimizer.step()
        step += 1
        os.write(1, f"step {rank} {step} {loss.item().hex()}\n".encode())
        note_first()
        fails("after")
        pace.wait(float(os.environ.get("PACE_S", "0.1")))
        if step == last_step():
            break
if world > 1:
    distributed.destroy_process_group()
    os._exit(0)  # some processes with gloo abort while the interpreter ends

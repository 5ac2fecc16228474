"""A training that lends its GPU memory between two steps; it runs as well where there is no hegm.

Each block prints what its tensors have on the GPU and continues when a line comes from the file that it was given.
"""

import contextlib
import sys
import threading
import warnings

import torch

try:
    from hegm import released
except ImportError:
    released = contextlib.nullcontext

answers = open(sys.argv[1], encoding="utf-8") if len(sys.argv) > 1 else None  # noqa: SIM115 - open to the end
torch.manual_seed(5)
model = torch.nn.Linear(256, 64)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def train(step: int) -> None:
    batch = torch.randn(32, 256)
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item().hex(), flush=True)


def tell(where: str) -> None:
    print(where, model.weight.untyped_storage().size(), flush=True)
    if answers is not None and not answers.readline():
        sys.exit("nobody answers")


train(0)
with released():
    tell("first")
    with released():
        tell("nested")
print("after", model.weight.untyped_storage().size(), flush=True)
with released():  # no step between two blocks
    tell("second")
train(1)
try:
    with released():
        raise ValueError("of the script")
except ValueError as error:
    print("raised", error, model.weight.untyped_storage().size(), flush=True)


def lend_elsewhere() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with released():
            print("thread", model.weight.untyped_storage().size(), *[str(one.message) for one in warned], flush=True)


thread = threading.Thread(target=lend_elsewhere)
thread.start()
thread.join()
for step in range(2, 6):
    train(step)
tell("end")

"""A training with a thread that ends every thread it does not know, on a command through a pipe.

The agent cannot stop that thread while the training is parked: the thread is traced, as a debugger traces it, and no
tool of `sys.monitoring` is free.
"""

import ctypes
import os
import selectors
import sys
import threading

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, TensorDataset


def end_unknown_threads() -> None:
    sys.settrace(lambda *_: None)
    selector = selectors.DefaultSelector()  # the agent's view of a thread at rest
    told = os.open(os.environ["HEGM_TEST_TOLD"], os.O_RDWR)
    selector.register(told, selectors.EVENT_READ)
    while selector.select() and os.read(told, 100):
        known = {thread.ident for thread in threading.enumerate()}
        for ident in sys._current_frames().keys() - known:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
        print("told", file=sys.stderr, flush=True)


if sys.version_info >= (3, 12):
    for tool in (3, 4):
        sys.monitoring.use_tool_id(tool, "the script's")
threading.Thread(target=end_unknown_threads, daemon=True).start()
torch.manual_seed(9)
weights = torch.nn.Parameter(torch.randn(4096))
optimizer = torch.optim.SGD([weights], lr=0.01)
for (batch,) in DataLoader(TensorDataset(torch.randn(4000, 1)), batch_size=1):
    loss = (weights[:8] * batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(float(loss.item()).hex())

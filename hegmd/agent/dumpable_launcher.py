"""Keeps torchrun's launcher free of what CRIU cannot dump: io_uring, and open GPU devices.

The store where its ranks meet uses libuv, which uses io_uring. PyTorch has another server, and the variable USE_LIBUV
to choose it, but torchrun's own stores ignore it: here they do not. `hegmctl run` sets it to 0 unless the user has set
it. The launcher also asks for the number of GPUs, and for their NUMA nodes, which opens the driver's devices
permanently: here a child process asks. Other processes are not changed.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from ..protocol.codec import decode, encode
from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_VARIABLE, _ARGUMENT = "USE_LIBUV", "use_libuv"
# Its position among the arguments of a store.
_PLACE = 8
# The functions of torch.cuda that a launcher calls.
_QUESTIONS = ("is_available", "device_count", "get_device_properties")
_ANSWERS_WITHIN_MS = 60_000
_PLAIN = (bool, int, float, str)


def choose_stores(_module: Any) -> None:
    """Have stores that are made from here on go by the variable. `_module` is torchrun's table of rendezvous."""
    distributed: Any = sys.modules.get("torch.distributed")
    store = getattr(distributed, "TCPStore", None)
    if os.environ.get(_VARIABLE) != "0" or store is None:
        return
    if _ARGUMENT not in (store.__init__.__doc__ or ""):  # this PyTorch has no libuv
        return

    def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: N807 - of the class below
        if len(args) <= _PLACE:
            named.setdefault(_ARGUMENT, False)
        store.__init__(self, *args, **named)

    kept = {name: getattr(store, name) for name in ("__module__", "__qualname__", "__doc__")}
    distributed.TCPStore = type(store.__name__, (store,), {**kept, "__init__": __init__})
    note("this launcher's stores do without libuv")


def ask_in_children() -> None:
    """Let child processes answer a launcher's questions about its GPUs, as long as it uses no CUDA itself."""
    cuda: Any = sys.modules.get("torch.cuda")
    for name in _QUESTIONS:
        question = getattr(cuda, name, None)
        if question is not None:
            setattr(cuda, name, _in_child(cuda, question))


def _in_child(cuda: Any, question: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **named: Any) -> Any:
        reply = None if cuda.is_initialized() else _child_answer(lambda: question(*args, **named))
        if reply is None:
            return question(*args, **named)
        return _ReportedObject(reply) if hasattr(reply, "items") else reply

    return ask


def _child_answer(question: Callable[[], Any]) -> Any:
    """Return the child's answer; None if no child answers in time."""
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        note(f"no child can ask for the GPUs: {error}")
        os.close(reader)
        os.close(writer)
        return None
    if child == 0:
        try:
            os.write(writer, encode({"told": _plain(question())}))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        waiting = select.poll()
        waiting.register(answer, select.POLLIN)
        if not waiting.poll(_ANSWERS_WITHIN_MS):
            os.kill(child, signal.SIGKILL)
        reply = answer.read()
    try:
        os.waitpid(child, 0)
    except ChildProcessError:  # SIGCHLD is ignored here, and the kernel has reaped it
        pass
    return decode(reply)["told"] if reply else None


class _ReportedObject:
    """An object of PyTorch, with the attributes that a child process reported."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)


def _plain(answer: Any) -> Any:
    """Return the answer, or the attributes of one of PyTorch's objects by name."""
    if type(answer) in _PLAIN:
        return answer
    found = {name: getattr(answer, name) for name in dir(answer) if not name.startswith("_")}
    return {name: value for name, value in found.items() if type(value) in _PLAIN}

"""A helper that plays tricks: the real process with its real life, and requests that no driver is needed for.

python tricks.py [well|brisk|refuse|crash|deaf] DESCRIPTOR
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping

from hegmd.errors import Refused
from hegmd.gpu_helper.child import run
from hegmd.gpu_helper.wire import DriverFailed, Handler, HelperReply, Request
from hegmd.system.descriptors import Descriptors

SOCKET = int(sys.argv[-1])
go = threading.Event()
held: list[int] = []


def ping(request: Request) -> HelperReply:
    return HelperReply({"pong": request.args})


def hang(request: Request) -> HelperReply:
    request.tell({"pid": os.getpid()})
    threading.Event().wait()
    return HelperReply({})


def wait(request: Request) -> HelperReply:
    """Wait until a request for `go`."""
    request.tell({"waiting": True})
    go.wait()
    return HelperReply({}, Descriptors([os.memfd_create("late")]))


def release(_: Request) -> HelperReply:
    """Let those that wait continue; the answer to this comes after theirs."""
    go.set()
    for thread in threading.enumerate():
        if thread.name == "wait":
            thread.join()
    return HelperReply({})


def stop(_: Request) -> HelperReply:
    """As if the interpreter's lock were held for ever: the helper reads and answers nothing."""
    os.kill(os.getpid(), signal.SIGSTOP)  # may take effect on another thread, and later
    threading.Event().wait()
    return HelperReply({})


def give_back(request: Request) -> HelperReply:
    return HelperReply({"came": len(request.fds)}, Descriptors(request.fds.take()))


def make(request: Request) -> HelperReply:
    return HelperReply({}, Descriptors([os.memfd_create(f"made {i}") for i in range(request.args["count"])]))


def hold(request: Request) -> HelperReply:
    held[:] = [0] * request.args["count"]
    return HelperReply({})


def refuse(_: Request) -> HelperReply:
    raise Refused("no room: 7 of 9", "try later", {"free_bytes": 7})


def fail_in_the_driver(request: Request) -> HelperReply:
    raise DriverFailed("cuCheckpointProcessLock", request.args["number"], "CUDA_ERROR_NOT_READY")


def stumble(_: Request) -> HelperReply:
    raise ValueError("a mistake in the helper")


def count(request: Request) -> HelperReply:
    for number in range(request.args["to"]):
        request.tell({"at": number})
    return HelperReply({})


def environment(_: Request) -> HelperReply:
    return HelperReply({"environment": dict(os.environ), "descriptors": len(os.listdir("/proc/self/fd")) - 1})


def leave(request: Request) -> HelperReply:
    os.write(2, b"the last words\n")
    os._exit(request.args["status"])


def talk_nonsense(request: Request) -> HelperReply:
    os.write(SOCKET, request.args["bytes"])
    if request.args["leave"]:
        os._exit(0)
    return HelperReply({})


TABLE: Mapping[str, Handler] = {
    "ping": ping,
    "hang": hang,
    "wait": wait,
    "release": release,
    "stop": stop,
    "give-back": give_back,
    "make": make,
    "hold": hold,
    "refuse": refuse,
    "driver": fail_in_the_driver,
    "stumble": stumble,
    "count": count,
    "environment": environment,
    "leave": leave,
    "nonsense": talk_nonsense,
}


def make_ready() -> tuple[Mapping[str, Handler], Callable[[], int], Mapping[str, object]]:
    how = sys.argv[1]
    if how == "refuse":
        raise DriverFailed("cuInit", 100, "CUDA_ERROR_NO_DEVICE")
    if how == "crash":
        raise RuntimeError("no libcuda.so.1 anywhere")
    if how == "deaf":
        threading.Event().wait()
    greeting: dict[str, object] = {"driver_version": 13000}
    return TABLE, lambda: len(held), {**greeting, "beat_s": 0.02} if how == "brisk" else greeting


if __name__ == "__main__":
    run(make_ready)

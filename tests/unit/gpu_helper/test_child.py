"""The child's imports: few, so that it starts quickly, and none that keeps it from exiting."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, cast

from hegmd.gpu_helper.child import Child
from hegmd.gpu_helper.wire import HelperReply, Request
from hegmd.system.descriptors import Descriptors


def test_the_child_imports_no_event_loop_and_no_logging() -> None:
    """They take longer than the rest of the child's start, while a job may be waiting."""
    text = "import hegmd.gpu_helper.child, hegmd.gpu_helper.requests, sys; print(*sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, env=environment)
    heavy = {"anyio", "asyncio", "subprocess", "logging", "dataclasses", "argparse", "cuda.bindings"}
    assert not heavy & set(done.stdout.split())


class Sent:
    """The helper's replies. The first one waits until the other was sent, or waits for this one."""

    def __init__(self) -> None:
        self.requests = [{"id": 1, "op": "open", "args": {}}, {"id": 2, "op": "close", "args": {}}]
        self.answers: list[Mapping[str, Any]] = []
        self.counted = threading.Event()

    def receive(self) -> tuple[dict[str, Any], Descriptors] | None:
        return (self.requests.pop(0), Descriptors([])) if self.requests else None

    def send(self, message: Mapping[str, Any], _fds: tuple[int, ...] = ()) -> None:
        if message.get("id") == 1:
            self.counted.set()
            while not self.answers and not self._is_other_waiting():
                os.sched_yield()
        if "id" in message:
            self.answers.append(message)

    def _is_other_waiting(self) -> bool:
        ident = next((thread.ident for thread in threading.enumerate() if thread.name == "close"), None)
        frame = sys._current_frames().get(ident or 0)
        return frame is not None and frame.f_code.co_name == "_end"


def answer_at_once() -> None:
    """Open a copy session and close another at the same time; print both answers. In a process of its own, which ends
    the thread that reports periodically.
    """
    sent, held = Sent(), 0

    def answer(held_then: int) -> HelperReply:
        nonlocal held
        held = held_then
        return HelperReply({})

    def close(_request: Request) -> HelperReply:
        sent.counted.wait()
        return answer(0)

    before = set(threading.enumerate())
    Child(cast(Any, sent), {"open": lambda _: answer(1), "close": close}, lambda: held).serve({"beat_s": 3600.0})
    for thread in set(threading.enumerate()) - before:
        if thread.name != "beat":
            thread.join()
    sys.stdout.write(repr([(found["id"], found["held"]) for found in sent.answers]))


def test_an_answer_with_an_older_count_of_copy_sessions_overtook_a_newer_one() -> None:
    """The daemon then ended a helper that had a session as idle, or never ended one that had none."""
    text = f"import {__name__} as test; test.answer_at_once()"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "[(1, 1), (2, 0)]"

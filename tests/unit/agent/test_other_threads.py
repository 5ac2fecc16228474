"""The threads that prevent an offload, by where they are in Python. Real threads, blocked in a read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

from hegmd.agent.other_threads import busy_threads


@contextmanager
def blocked(path: Path) -> Iterator[None]:
    """A thread that waits in a read, in code of that file, until the context ends."""
    ours, theirs = os.pipe()
    begun = threading.Event()
    code: CodeType = compile("def wait(begun, read, fd):\n    begun.set()\n    read(fd, 1)\n", str(path), "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    thread = threading.Thread(target=names["wait"], args=(begun, os.read, ours))
    thread.start()
    try:
        begun.wait()
        yield
    finally:
        os.write(theirs, b"x")
        thread.join()
        os.close(ours)
        os.close(theirs)


def busy_at(path: Path) -> list[str]:
    """Return the findings for that file; other threads, such as the test runner's, do not matter."""
    found = busy_threads(frozenset((threading.get_ident(),)), frozenset())
    return [words for words in found if str(path) in words]


def test_a_thread_in_its_own_code_is_busy(tmp_path: Path) -> None:
    with blocked(tmp_path / "script.py"):
        assert len(busy_at(tmp_path / "script.py")) == 1


def test_the_compilers_threads_do_not_keep_a_compiled_training_from_parking(tmp_path: Path) -> None:
    """Seen with torch 2.11 on CUDA: its timer sleeps in a thread of its own, and every order to park was refused."""
    timer = tmp_path / "torch" / "_inductor" / "compile_worker" / "timer.py"
    with blocked(timer):
        assert busy_at(timer) == []

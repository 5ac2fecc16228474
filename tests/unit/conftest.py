"""Processes that live, for agents to attend from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


@pytest.fixture
def second_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


@pytest.fixture
def third_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


@pytest.fixture
def stopped() -> Iterator[int]:
    """A process that is stopped, as after a dump."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True) as job:
        try:
            os.kill(job.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, job.pid, os.WSTOPPED)
            yield job.pid
        finally:
            job.kill()


@pytest.fixture
def paused() -> Iterator[int]:
    """A process that waits for a signal."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True) as job:
        try:
            yield job.pid
        finally:
            job.kill()

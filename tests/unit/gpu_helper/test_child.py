"""The child's imports: few, so that it starts quickly, and none that keeps it from exiting."""

from __future__ import annotations

import subprocess
import sys


def test_the_child_imports_no_event_loop_and_no_logging() -> None:
    """They take longer than the rest of the child's start, while a job may be waiting."""
    text = "import hegmd.gpu_helper.child, hegmd.gpu_helper.requests, sys; print(*sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, env=environment)
    heavy = {"anyio", "asyncio", "subprocess", "logging", "dataclasses", "argparse", "cuda.bindings"}
    assert not heavy & set(done.stdout.split())

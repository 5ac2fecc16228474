"""hegmctl as a real process, in this tree and with this Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.patience import HANG_S
from tests.unit.hegmctl.forking import forking_for

NOBODY = 65_534
ROOT = Path(__file__).resolve().parents[3]
# The variables that `hegmctl run` sets for NCCL.
NCCL = ("NCCL_NVLS_ENABLE", "NCCL_CUMEM_HOST_ENABLE")
# Compiled once for all the runs of a session, wherever the tree's own caches are switched off.
_CACHE = Path(tempfile.gettempdir()) / f"hegmctl-tests-{os.getuid()}"


def environment(socket: Path | str | None = None, **more: str) -> dict[str, str]:
    """The environment in which hegmctl is run: nothing of the caller's that it would go by."""
    environ = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    environ |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "PYTHONPYCACHEPREFIX": str(_CACHE), "TZ": "UTC"}
    if socket is not None:
        environ["HEGM_SOCKET"] = str(socket)
    return {**environ, **more}


def command(*words: str) -> list[str]:
    """The words that run hegmctl."""
    return [sys.executable, "-m", "hegmctl", *words]


def as_nobody(*argv: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program as the user `nobody`, in no group. Skip the test if this process may not change its user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")

    def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            env=environ,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    try:
        readable = run([sys.executable, "-c", "import hegmctl.cli"]).returncode == 0
    except PermissionError:
        readable = False
    if not readable:
        pytest.skip(f"nobody may not read {sys.executable} or {ROOT}")
    return run(argv)


def hegmctl(
    *words: str, socket: Path | str | None = None, environ: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run hegmctl until it exits. Both outputs are pipes."""
    whole = environment(socket, **(environ or {}))
    forking = forking_for(whole)
    if forking is not None:
        return forking.run(words, whole, cwd or ROOT)
    return subprocess.run(
        command(*words),
        env=whole,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=cwd or ROOT,
        check=False,
    )

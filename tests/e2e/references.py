"""The output of undisturbed scripts, for tests that compare: run in full, and forked where that is possible."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.e2e.forked import started
from tests.patience import HANG_S

# PyTorch would start a Python for each processor, which imports it as well, to compile three functions; and it would
# compile nine programs more, to see that those instructions which the processor names are there. It looks once.
ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
# The command before a script that trains in two ranks, in place of a launcher.
TWO_RANKS = (str(Path(__file__).with_name("ranks_alone.py")), "2")
ENDS_WITHIN_S = HANG_S


def output_of(argv: Sequence[str], environ: Mapping[str, str], folder: Path | None = None) -> str:
    """Return a script's standard output; the script has to succeed. `argv` is what comes after `python`."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        script = started([sys.executable, *argv], env=environ, cwd=folder, stdout=output, stderr=errors)
        status = script.wait(10 * ENDS_WITHIN_S)
        errors.seek(0)
        assert status == 0, f"{argv} ended with {status}: {errors.read()}"
        output.seek(0)
        return output.read()


def folder_of_run(factory: pytest.TempPathFactory) -> Path:
    """The folder of all workers of this run."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once_for_all(factory: pytest.TempPathFactory, name: str, lines_of: Callable[[Path], list[str]]) -> list[str]:
    """Return the lines that the first of several workers has obtained in a folder of its own; the others read them."""
    shared = folder_of_run(factory)
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = shared / f"{name}.json"
        if not known.exists():
            known.write_text(json.dumps(lines_of(factory.mktemp(name))))
        lines: list[str] = json.loads(known.read_text())
        return lines

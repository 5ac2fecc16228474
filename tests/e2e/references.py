"""The output of undisturbed scripts, for tests that compare: run in full, and forked where that is possible."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

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

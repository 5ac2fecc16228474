"""What scripts print that nobody disturbs, for tests that compare: run in full, but started by a fork.

Two seconds of processor are the import of PyTorch, and how a reference starts proves nothing. Owns the Python that has
imported it (preloaded.py), one for each process that runs tests, for as long as the fixture of that name in conftest.py
is there; without it, scripts are started as any.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.patience import HANG_S

PRELOADED = Path(__file__).with_name("preloaded.py")
# PyTorch would start a Python for each processor, which imports it as well, to compile three functions; and it would
# compile nine programs more, to see that those instructions which the processor names are there. It looks once.
ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
# What goes before a script that trains in two ranks, in place of a launcher.
TWO_RANKS = (str(Path(__file__).with_name("ranks_alone.py")), "2")
ENDS_WITHIN_S = HANG_S

_there: list[subprocess.Popen[str]] = []
_numbers = itertools.count()


@contextmanager
def preloaded_python(environ: Mapping[str, str]) -> Iterator[None]:
    """From here on, `said_by` forks from a Python with PyTorch in it, which has that environment."""
    words = [sys.executable, str(PRELOADED)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as python:
        _there.append(python)
        try:
            yield
        finally:
            _there.remove(python)
            assert python.stdin is not None
            python.stdin.close()
            python.wait(ENDS_WITHIN_S)


def said_by(argv: Sequence[str], environ: Mapping[str, str], folder: Path | None = None) -> str:
    """What a script prints on standard output; it has to end well. `argv` is what comes after `python`."""
    if not _there or argv[0].startswith("-"):
        return _said_by_its_own(argv, environ, folder)
    number = next(_numbers)
    with tempfile.TemporaryDirectory(prefix="hegm-reference-") as made:
        output, errors = Path(made, "output"), Path(made, "errors")
        wanted = {
            "number": number,
            "argv": list(argv),
            "environment": dict(environ),
            "output": str(output),
            "errors": str(errors),
            "folder": str(folder or Path.cwd()),
            "record": None,
            "agent": False,
        }
        (python,) = _there
        assert python.stdin is not None
        assert python.stdout is not None
        python.stdin.write(json.dumps(wanted) + "\n")
        python.stdin.flush()
        answered = -1
        while answered != number:  # but of one that nobody waited for, in a test that took too long
            answered, status = map(int, python.stdout.readline().split())
        assert status == 0, f"{argv} ended with {status}: {errors.read_text()}"
        return output.read_text()


def _said_by_its_own(argv: Sequence[str], environ: Mapping[str, str], folder: Path | None) -> str:
    done = subprocess.run(
        [sys.executable, *argv],
        env=environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=10 * ENDS_WITHIN_S,  # of chaos, which takes an hour, the longest
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

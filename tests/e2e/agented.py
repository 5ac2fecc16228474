"""A training script as a child process with the agent in it, and the same one undisturbed, to compare with.

The scripts in `training/` know nothing of hegm: each prints every loss bit for bit. Owns the processes; what they are
ordered to do is up to the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import TracebackType

import msgpack
from typing_extensions import Self

from tests.e2e.forked import not_forked, started
from tests.e2e.references import output_of
from tests.patience import HANG_S

SCRIPTS = Path(__file__).with_name("training")
INJECT = Path(__file__).parents[2] / "hegmd" / "agent" / "inject"
BRISK = Path(__file__).with_name("brisk")
ENDS_WITHIN_S = HANG_S


def environment(socket_path: Path | None, inject: str = str(INJECT), **more: str) -> dict[str, str]:
    """The environment of a script: with the agent if there is a socket, plain otherwise."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HEGM_", "PYTHON"))}
    plain.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", **more)
    if socket_path is not None:
        plain.update(HEGM_SOCKET=str(socket_path), HEGM_MSGPACK=str(Path(msgpack.__file__).parent))
        plain["PYTHONPATH"] = os.pathsep.join([inject, *filter(None, [more.get("PYTHONPATH")])])
    return plain


class Training:
    """A script that runs with the agent. Killed at the end of the context, if it has not ended before."""

    # Whether it may be forked from a Python that has imported PyTorch.
    forks = True

    def __init__(
        self, argv: list[str], socket_path: Path, python: str = sys.executable, inject: str = str(INJECT), **more: str
    ) -> None:
        if python == sys.executable:
            more.setdefault("PYTHONPATH", str(BRISK))
        start = started if self.forks and inject == str(INJECT) else not_forked
        self.process = start(
            [python, *argv],
            env=environment(socket_path, inject, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def result(self) -> tuple[int, str, str]:
        """Exit status, output and errors, once it has ended."""
        output, errors = self.process.communicate(timeout=ENDS_WITHIN_S)
        assert self.process.returncode is not None
        return self.process.returncode, output, errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def undisturbed(argv: list[str], **more: str) -> str:
    """The output of the script without an agent; each is run once for all tests, since it prints the same each time."""
    return _run(tuple(argv), tuple(more.items()))


@cache
def _run(argv: tuple[str, ...], more: tuple[tuple[str, str], ...]) -> str:
    return output_of(argv, environment(None, **dict(more)))

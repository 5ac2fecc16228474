"""The check that a job's Python can load an agent without a change to the job.

The agent is loaded by a sitecustomize module in a directory on PYTHONPATH. Only starting an interpreter shows whether
it loads that: distributions patch this, and an environment may have its own sitecustomize. The check tries the
interpreters on the node's path; the daemon does not run those of users' environments.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from hegmd.errors import ExternalError
from hegmd.node.doctor.facts import CheckResult, NodeFacts, clipped, listed, ok, skip, version_numbers, warn
from hegmd.system.programs import run
from hegmd.system.threads import run_detached

OLDEST_PYTHON = (3, 9)

_PROBE_DEADLINE_S = 4.0
_MOST = 3
_LOADED = "hegm-sitecustomize-loaded"
_TELL = "import platform; print(platform.python_version())"


async def injection(facts: NodeFacts) -> CheckResult:
    """Every python3 on the node's path loads a sitecustomize from PYTHONPATH."""
    interpreters = await run_detached(lambda _: interpreters_on(facts.python_path), name="find python3")
    if not interpreters:
        return skip(f"there is no python3 in {facts.python_path}")
    fine: list[str] = []
    with _probe_directory() as directory:
        for interpreter in interpreters[:_MOST]:
            version, problem = await _probe(interpreter, directory)
            if problem is not None:
                return problem
            fine.append(f"{interpreter} ({version})")
    return ok(f"{listed(fine, 2)} {'loads' if len(fine) == 1 else 'load'} a sitecustomize from PYTHONPATH")


def interpreters_on(path: str) -> list[str]:
    """The python3 programs in those directories, each once however many names it has."""
    found: dict[str, str] = {}
    for directory in path.split(":"):
        candidate = os.path.join(directory, "python3")
        if directory.startswith("/") and os.access(candidate, os.X_OK):
            found.setdefault(os.path.realpath(candidate), candidate)
    return list(found.values())


@contextmanager
def _probe_directory() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="hegm-doctor-") as name:
        Path(name, "sitecustomize.py").write_text(f"print({_LOADED!r})\n", encoding="ascii")
        yield Path(name)


async def _probe(interpreter: str, directory: Path) -> tuple[str, CheckResult | None]:
    """Return the interpreter's version, and what is wrong with it, if anything."""
    # No bytecode: this process might not be able to remove the files that the interpreter writes.
    environment = {"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = await run([interpreter, "-c", _TELL], deadline_s=_PROBE_DEADLINE_S, env=environment)
        lines = done.require(f"{interpreter} -c pass").stdout.splitlines()
    except ExternalError as error:
        return "", warn(f"{interpreter} does not run: {clipped(error.message, 60)}", error.hint)
    version = lines[-1] if lines else ""
    if version_numbers(version) < OLDEST_PYTHON:
        fix = "run GPU jobs with Python 3.9 or newer, from an environment of their own"
        return version, warn(f"{interpreter} is Python {version}; an agent needs 3.9", fix)
    if _LOADED not in lines:
        fix = f"PYTHONPATH=DIR {interpreter} -v -c pass 2>&1 | grep sitecustomize shows what Python loads instead"
        return version, warn(f"{interpreter} ({version}) loads no sitecustomize from PYTHONPATH", fix)
    return version, None

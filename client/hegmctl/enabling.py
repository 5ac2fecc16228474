"""`hegmctl hegm enable`: HeGM's form of use, for the Pythons of one environment.

Writes two files into the environment's packages. It is a `.pth` file and no `sitecustomize`, because Debian's Python
has a `sitecustomize` that hides any installed one. Files of others are neither overwritten nor removed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hegmctl.answers import HegmAnswer
from hegmctl.arguments import absolute
from hegmctl.running import inject_folder, msgpack_folder
from hegmd.errors import EXTERNAL, NOT_FOUND, USAGE, HegmError, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.cli import Session
    from hegmctl.tables import Style

NAME = "hegmd_enabled"
_OURS = "# Made by `hegmctl hegm enable`; `hegmctl hegm disable` removes it.\n"
_AGENT = "AGENT = "
_START = (
    _OURS
    + """import os
import sys

AGENT = {agent!r}


def start():
    if sys.version_info < (3, 9) or "_hegm" in sys.modules:
        return
    if any(entry.rstrip("/").endswith("/agent/inject") for entry in sys.path):  # by hegmctl run or hegm-launcher
        return
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("_hegm", AGENT + "/__init__.py", submodule_search_locations=[AGENT])
    package = sys.modules["_hegm"] = module_from_spec(spec)
    spec.loader.exec_module(package)
    os.environ.setdefault("HEGM_MSGPACK", {msgpack!r})
    __import__("_hegm.agent.enabled")
    sys.modules["_hegm.agent.enabled"].mount()


try:
    start()
except Exception:  # after any failure, Python starts as it would without the agent
    sys.modules.pop("_hegm", None)
"""
)
_LINE = f"{_OURS}import {NAME}\n"


def enable(session: Session) -> int:
    venv, folders = _environment(session)
    agent = os.path.dirname(os.path.dirname(inject_folder()))
    script = _START.format(agent=agent, msgpack=msgpack_folder())
    for folder in folders:
        for name, text in ((f"{NAME}.py", script), (f"{NAME}.pth", _LINE)):
            _write(folder / name, text)
    return _answer(session, venv, folders)


def disable(session: Session) -> int:
    venv, folders = _environment(session)
    for folder in folders:
        for name in (f"{NAME}.pth", f"{NAME}.py"):
            _require_own(folder / name)
            try:
                (folder / name).unlink(missing_ok=True)
            except OSError as error:
                raise _not_written(folder / name, error) from error
    return _answer(session, venv, folders)


def status(session: Session) -> int:
    return _answer(session, *_environment(session))


def _environment(session: Session) -> tuple[Path, list[Path]]:
    """Return the environment and the package directories of its Pythons. Raises HegmError."""
    named = session.arguments.text("venv") or os.environ.get("VIRTUAL_ENV")
    if not named:
        hint = "hegmctl hegm enable --venv DIR, or activate the environment first"
        raise HegmError(USAGE, "no environment is named, and VIRTUAL_ENV is not set", hint)
    venv = Path(absolute(named))
    folders: list[Path] = []
    with suppress(OSError):  # such as a name that is too long
        if (venv / "pyvenv.cfg").is_file():
            folders = sorted(path for path in venv.glob("lib/python3*/site-packages") if path.is_dir())
    if not folders:
        raise HegmError(NOT_FOUND, f"{venv} is no virtual environment", f"make one: python3 -m venv {venv}")
    return venv, folders


def _answer(session: Session, venv: Path, folders: list[Path]) -> int:
    is_enabled = all(_is_own(folder / f"{NAME}{end}") for folder in folders for end in (".py", ".pth"))
    agent = None
    if is_enabled:
        lines = (folders[0] / f"{NAME}.py").read_text().splitlines()
        agent = next((line[len(_AGENT) :].strip("'\"") for line in lines if line.startswith(_AGENT)), None)
    session.sink.answer(HegmAnswer(venv=str(venv), is_enabled=is_enabled, agent=agent), _text)
    return 0


def _text(answer: HegmAnswer, _style: Style) -> list[str]:
    if not answer.is_enabled:
        return [f"{answer.venv}: not enabled"]
    return [f"{answer.venv}: enabled; a training there saves its state at SIGUSR1 (agent: {answer.agent})"]


def _write(path: Path, text: str) -> None:
    _require_own(path)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> HegmError:
    hint = "run it as the user who owns the environment"
    return HegmError(EXTERNAL, f"{path} cannot be changed: {error.strerror}", hint)


def _require_own(path: Path) -> None:
    if os.path.lexists(path) and not _is_own(path):
        raise Refused(f"{path} exists, and is not hegmd's", "move it away")


def _is_own(path: Path) -> bool:
    try:
        return not path.is_symlink() and path.read_text().startswith(_OURS)
    except (OSError, ValueError):
        return False

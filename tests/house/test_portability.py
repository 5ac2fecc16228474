"""Code shared with the agent works on Python 3.9, and hegmctl imports little enough to start fast."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import PACKAGES, ROOT, module, names

# These run inside a worker, on the worker's Python. The reference generator is for the maintainers' machines only.
SHARED = tuple(
    name
    for room in ("hegm", "hegmd.errors", "hegmd.protocol", "hegmd.agent")
    for name in names(room)
    if name not in {"hegmd.protocol.__main__", "hegmd.agent.inject.sitecustomize"}
)

# Each costs from one to eight milliseconds of the 25 that a whole `hegmctl gpus` may take.
TOO_SLOW_FOR_THE_CLIENT = {
    "anyio",
    "argparse",
    "asyncio",
    "dataclasses",
    "enum",
    "inspect",
    "json",
    "logging",
    "pathlib",
    "re",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "typing",
}


def _loaded_by(python: Path | str, statement: str, *, path: list[Path]) -> set[str]:
    """The modules that a statement adds to a fresh interpreter, without site-packages' own start-up."""
    code = f"import sys; before = set(sys.modules) | {{'json'}}\n{statement}\n"
    # The report itself needs json: what it pulls in is read off before it is imported.
    code += "loaded = sorted(set(sys.modules) - before)\nimport json\nsys.stderr.write(json.dumps(loaded))"
    done = subprocess.run(
        [python, "-S", "-c", code],
        env={"PYTHONPATH": os.pathsep.join(map(str, path)), "MSGPACK_PUREPYTHON": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr))


def _site_packages() -> Path:
    import msgpack

    return Path(msgpack.__file__).parents[1]


def _newer_than_3_9(*paths: Path) -> str:
    """Return what needs a later Python in these files, one `file:line: what` a line; syntax, modules, functions,
    arguments.
    """
    vermin = Path(sys.executable).with_name("vermin")
    if not vermin.exists():
        pytest.skip("vermin is not installed; `make check` installs it")
    argv = [str(vermin), "-t=3.9-", "--violations", "--no-tips", "--format", "parsable", *map(str, paths)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.thorough
def test_code_shared_with_the_agent_uses_nothing_newer_than_python_3_9() -> None:
    assert _newer_than_3_9(ROOT / "hegmd" / "__init__.py", *(module(name).path for name in SHARED)) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["match 1:\n    case 1: pass", "zip([], [], strict=True)", "import tomllib"])
def test_newer_syntax_is_detected(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.py").write_text(text)
    assert "x.py:1" in _newer_than_3_9(tmp_path / "x.py")


@pytest.mark.thorough
def test_code_shared_with_the_agent_loads_the_standard_library_and_msgpack_only() -> None:
    statement = "import " + ", ".join(SHARED)
    loaded = _loaded_by(sys.executable, statement, path=[ROOT, _site_packages()])
    foreign = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names - {"hegm", "hegmd", "msgpack"}
    assert not foreign


def _python_3_9() -> str:
    """Any Python 3.9 of this machine; version managers keep theirs in a hidden folder of the home directory."""
    places = [shutil.which("python3.9") or "", *map(str, sorted(Path.home().glob(".*/versions/3.9*/bin/python3.9")))]
    for place in filter(None, reversed(places)):
        if subprocess.run([place, "-c", ""], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return place
    pytest.skip("no Python 3.9 here; syntax and library are still held to it by vermin, above")


@pytest.mark.thorough
def test_code_shared_with_the_agent_loads_on_a_real_python_3_9() -> None:
    statement = "import " + ", ".join(SHARED)
    loaded = _loaded_by(_python_3_9(), statement, path=[ROOT, _site_packages()])
    assert set(SHARED) <= loaded


def _client_path() -> list[Path]:
    return [folder.parent for folder in PACKAGES.values()] + [_site_packages()]


@pytest.mark.thorough
def test_the_client_loads_nothing_slow() -> None:
    loaded = _loaded_by(sys.executable, "import hegmctl.cli", path=_client_path())
    assert "hegmctl.cli" in loaded
    assert not loaded & TOO_SLOW_FOR_THE_CLIENT


@pytest.mark.thorough
def test_a_slow_import_is_detected() -> None:
    loaded = _loaded_by(sys.executable, "import argparse", path=[])
    assert {"argparse", "re", "enum"} <= loaded & TOO_SLOW_FOR_THE_CLIENT

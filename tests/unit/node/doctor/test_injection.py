"""The check that an interpreter loads a sitecustomize from PYTHONPATH, on real and on false interpreters."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest

from hegmd.node.doctor.injection import injection, interpreters_on
from tests.unit.node.doctor.node import FileNode


def interpreter(directory: Path, text: str) -> str:
    directory.mkdir(exist_ok=True)
    program = directory / "python3"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(directory)


def real_python(directory: Path, options: str) -> str:
    return interpreter(directory, f'exec {os.path.realpath(sys.executable)} {options} "$@"')


async def test_a_real_interpreter_loads_it(node: FileNode, socket_dir: Path) -> None:
    path = real_python(socket_dir / "bin", "")
    found = await injection(node.facts(python_path=path))
    version = ".".join(map(str, sys.version_info[:3]))
    assert found.status == "ok"
    assert f"({version}) loads a sitecustomize" in found.summary


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
async def test_an_interpreter_that_ignores_the_environment(node: FileNode, socket_dir: Path, option: str) -> None:
    found = await injection(node.facts(python_path=real_python(socket_dir / "bin", option)))
    assert found.status == "warn"
    assert found.fix is not None
    assert "grep sitecustomize" in found.fix


async def test_an_interpreter_that_is_too_old(node: FileNode, socket_dir: Path) -> None:
    path = interpreter(socket_dir / "bin", "echo hegm-sitecustomize-loaded; echo 3.6.8")
    found = await injection(node.facts(python_path=path))
    assert found.status == "warn"
    assert "is Python 3.6.8; an agent needs 3.9" in found.summary


async def test_an_interpreter_that_does_not_run(node: FileNode, socket_dir: Path) -> None:
    found = await injection(node.facts(python_path=interpreter(socket_dir / "bin", "exit 127")))
    assert found.status == "warn"
    assert "does not run" in found.summary


async def test_one_bad_interpreter_among_good_ones_is_named(node: FileNode, socket_dir: Path) -> None:
    good = real_python(socket_dir / "good", "")
    bad = real_python(socket_dir / "bad", "-I")
    found = await injection(node.facts(python_path=f"{good}:{bad}"))
    assert found.status == "warn"
    assert "/bad/python3" in found.summary


async def test_no_interpreter(node: FileNode, socket_dir: Path) -> None:
    assert (await injection(node.facts(python_path=str(socket_dir)))).status == "skip"


async def test_the_probe_leaves_nothing_behind(node: FileNode, socket_dir: Path) -> None:
    log = socket_dir / "told"
    path = interpreter(socket_dir / "bin", f'echo "$PYTHONPATH" > {log}; touch "$PYTHONPATH/left"; echo 3.11.0')
    await injection(node.facts(python_path=path))
    directory = await anyio.Path(log).read_text()
    assert directory.startswith("/")
    assert not await anyio.Path(directory.strip()).exists()


def test_an_interpreter_with_two_names_is_one(socket_dir: Path) -> None:
    first = Path(interpreter(socket_dir / "first", ""))
    second = socket_dir / "second"
    second.mkdir()
    (second / "python3").symlink_to(first / "python3")
    assert interpreters_on(f"{first}:{second}:relative:") == [str(first / "python3")]

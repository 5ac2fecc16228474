"""Asking a program which Python it is: what answers, what does not, and what is none."""

from __future__ import annotations

import os
import platform
import select
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from hegmctl.python_probe import NoPython, Probe, ProbeResult
from tests.patience import HANG_S
from tests.unit.offspring import children, reap

PATIENCE_S = HANG_S
ENVIRON = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/agent:/mine"}


@pytest.fixture(autouse=True)
def without_signals() -> Iterator[None]:
    """Each message raises SIGIO, for which a supervisor waits."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGIO, before)


def probed(python: str) -> ProbeResult:
    """Return the result of the probe, and check that it leaves no process."""
    others = children()
    probe = Probe(1, python, ENVIRON, monotonic())
    deadline = monotonic() + PATIENCE_S
    while (found := probe.check(0.0)) is None:
        assert monotonic() < deadline
        select.poll().poll(5)
    _end(probe, others)
    return found


def _end(probe: Probe, others: set[int]) -> None:
    """Reap ended children as a supervisor does; this process may have children of other tests."""
    probe.close()
    reap(children() - others)


def _script(folder: Path, text: str) -> str:
    path = folder / "python3"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_python_reports_its_version(tmp_path: Path) -> None:
    found = probed(sys.executable)
    assert (found.is_python, found.text) == (True, f"{sys.implementation.name} {platform.python_version()}")
    more = 'echo welcome\nexport PYTHONPATH="$PYTHONPATH:/more"\n'
    wrapped = probed(_script(tmp_path, f'#!/bin/sh\n{more}exec {shlex.quote(sys.executable)} "$@"\n'))
    assert (wrapped.is_python, wrapped.text) == (True, found.text)


@pytest.mark.thorough
def test_a_script_that_starts_python_without_its_environment_is_detected(tmp_path: Path) -> None:
    """A script that drops PYTHONPATH itself was not: the job started over there."""
    for words in ("exec {} -I", "exec {} -E", "exec {} -sE", "exec env -u PYTHONPATH {}", "PYTHONPATH=/more exec {}"):
        found = probed(_script(tmp_path, f'#!/bin/sh\n{words.format(shlex.quote(sys.executable))} "$@"\n'))
        assert found.text == f"{sys.implementation.name} {platform.python_version()} alone"


def test_a_program_other_than_python_does_not_count_as_python(tmp_path: Path) -> None:
    """The job had already left, and came back from its state after an impossible start."""
    assert probed("true").text == "asked for its version, it says nothing"
    complains = probed(_script(tmp_path, "#!/bin/sh\necho libpython3.12.so is missing >&2\nexit 127\n"))
    assert complains.text == "asked for its version, it says 'libpython3.12.so is missing'"
    assert not complains.is_python


@pytest.mark.parametrize(("name", "why"), [("no-such-python", "No such file"), ("", "Permission denied")])
def test_a_program_that_cannot_be_started_is_reported(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(NoPython, match=why):
        Probe(1, str(tmp_path / name), ENVIRON, 0.0)


def test_a_probe_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    others = children()
    probe = Probe(1, _script(tmp_path, "#!/bin/sh\nexec sleep 1000\n"), ENVIRON, 0.0)
    os.close(writer)
    assert probe.check(probe.deadline - 1) is None
    found = probe.check(probe.deadline)
    assert found is not None
    assert found.text == "it does not answer within 5 s"
    _end(probe, others)
    assert os.read(reader, 1) == b""
    os.close(reader)

"""The completions in the shells themselves, with a daemon that knows what to offer."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.patience import HANG_S
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import FakeDaemon
from tests.unit.hegmctl.running import environment
from tools.docs.hegmctl.completions import completions

COMMANDS = {"gpus", "ps", "events", "doctor", "version", "config", "metrics", "ping", "simulate", "help"}
COMMANDS |= {"run", "migrate", "suspend", "resume", "drain", "swap", "ops", "op", "cancel", "adopt", "images", "hegm"}
COMMANDS |= {"checkpoint", "restore", "quiesce", "offload", "handoff", "attach", "jobs", "inspect", "wait", "top"}
COMMANDS |= {"make-room", "release", "queue", "priority", "recovery"}
GLOBALS = {"--socket", "--json", "-q", "--quiet", "--color", "--no-color", "--timeout", "-h", "--help", "--version"}

# The line, split into words as bash does it, and the completions of the last word.
CASES: list[tuple[list[str], set[str]]] = [
    ([""], COMMANDS),
    (["ver"], {"version"}),
    (["--js"], {"--json"}),
    (["ps", "-"], {"--gpu", "--ways", "-w", "--watch"} | GLOBALS),
    (["gpus", "--long", "--"], {"--long"} | {name for name in GLOBALS if name.startswith("--")}),
    (["ps", "--gpu", ""], {"gpu0", "gpu1"}),
    (["--json", "ps", "--gpu", "gpu1"], {"gpu1"}),
    (["ps", ""], {"99", "4711"}),
    (["ps", "99", "4"], {"4711"}),
    (["ps", "--gpu", "gpu0", "4"], {"4711"}),
    (["events", "--kind", "v"], {"vendor"}),
    (["simulate", ""], {"hold", "fault"}),
    (["simulate", "hold", ""], {"gpu0", "gpu1"}),
    (["simulate", "fault", ""], {"gpu0", "gpu1", "vendor"}),
    (["simulate", "fault", "gpu0", "l"], {"lost"}),
    (["--socket", "/tmp/s", "simulate", "--timeout", "3", "fault", "gpu0", "x"], {"xid", "xid79"}),
    (["simulate", "--"], {name for name in GLOBALS if name.startswith("--")}),
    (["migrate", ""], {"99", "4711"}),
    (["migrate", "4711", "--to", ""], {"gpu0", "gpu1", "cpu"}),
    (["migrate", "4711", "--d"], {"--dry-run"}),
    (["swap", "4711", "9"], {"99"}),
    (["drain", "gpu"], {"gpu0", "gpu1"}),
    (["run", "--gpu", ""], {"gpu0", "gpu1", "cpu"}),
    (["op", ""], set()),
    (["help", "pi"], {"ping"}),
    (["gpus", ""], set()),
]


@pytest.fixture
def place(tmp_path: Path, socket_path: Path) -> Iterator[Path]:
    """A folder with the scripts and a `hegmctl`, in front of a daemon."""
    for name, text in completions().items():
        (tmp_path / name).write_text(text)
    program = tmp_path / "hegmctl"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hegmctl "$@"\n')
    program.chmod(0o755)
    with FakeDaemon(socket_path, node.answers()):
        yield tmp_path


def _environment(place: Path, socket_path: Path) -> dict[str, str]:
    return environment(socket_path, PATH=f"{place}:{os.environ['PATH']}", HOME=str(place), TERM="dumb")


def _bash(place: Path, socket_path: Path, words: list[str]) -> list[str]:
    program = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _hegmctl; printf "%s\\n" "${COMPREPLY[@]}"'
    ran = subprocess.run(
        ["bash", "--norc", "-c", program, str(place / "hegmctl.bash"), "hegmctl", *words],
        env=_environment(place, socket_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    return ran.stdout.split()


@pytest.mark.thorough
def test_bash(place: Path, socket_path: Path) -> None:
    for words, offered in CASES:
        found = _bash(place, socket_path, words)
        assert set(found) == offered, words
        assert len(found) == len(set(found)), words


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ps", "--gpu", "="], {"gpu0", "gpu1"}),
        (["ps", "--gpu", "=", "gpu1"], {"gpu1"}),
        (["ps", "--gpu", "=", "gpu1", "4"], {"4711"}),
        (["ps", "--watch", "=", "5", "4"], {"4711"}),
        (["events", "--kind", "=", "g"], {"gpu"}),
    ],
)
def test_bash_takes_an_option_and_its_value_apart_at_the_equals_sign(
    place: Path, socket_path: Path, words: list[str], offered: set[str]
) -> None:
    assert set(_bash(place, socket_path, words)) == offered


def test_bash_queries_the_daemon_that_the_line_names(place: Path, socket_path: Path) -> None:
    assert _bash(place, Path("/nowhere"), ["ps", "--gpu", ""]) == []
    assert set(_bash(place, Path("/nowhere"), ["--socket", str(socket_path), "ps", "--gpu", ""])) == {"gpu0", "gpu1"}


def test_bash_completes_files_and_commands(place: Path, socket_path: Path) -> None:
    assert _bash(place, socket_path, ["--socket", f"{place}/hegmctl.b"]) == [f"{place}/hegmctl.bash"]
    assert "hegmctl" in _bash(place, socket_path, ["simulate", "hold", "gpu0", "1GiB", "--", "hegmct"])


def _need(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")


@pytest.mark.thorough
def test_fish(place: Path, socket_path: Path) -> None:
    _need("fish")
    for words, offered in CASES:
        line = " ".join(["hegmctl", *words])
        ran = subprocess.run(
            ["fish", "--no-config", "-c", f"source {place}/hegmctl.fish; complete -C '{line}'"],
            env=_environment(place, socket_path),
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stderr == ""
        found = {entry.split("\t")[0] for entry in ran.stdout.splitlines()}
        if words[-1] == "-":  # fish shows the long form alone where there are two
            assert {name for name in offered if name.startswith("--")} <= found, words
        else:
            assert found == offered, words


class _Zsh:
    """An interactive zsh on a pty: the completions are listed below the line when Tab is pressed."""

    def __init__(self, place: Path, socket_path: Path) -> None:
        self._master, slave = os.openpty()
        self._process = subprocess.Popen(
            ["zsh", "-f", "-i"],
            env=_environment(place, socket_path),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            cwd=place,
        )
        os.close(slave)
        self.type("unsetopt zle_bracketed_paste; PS1='%% '; stty -echo; autoload -U compinit\n")
        self.type(f"fpath=({place} $fpath); compinit -u -D; zmodload zsh/zle; print READY\n")
        self.until("READY\r\n")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str) -> str:
        output = ""
        deadline = monotonic() + HANG_S
        while text not in output:
            assert select.select([self._master], [], [], max(deadline - monotonic(), 0))[0], (
                f"{text!r} not in {output!r}"
            )
            output += os.read(self._master, 4096).decode(errors="replace").replace("\x07", "")
        return output

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@pytest.mark.thorough
def test_zsh(place: Path, socket_path: Path) -> None:
    """In the line editor, as a person has it: what is missing of a word is written, or a list comes below."""
    _need("zsh")
    shell = _Zsh(place, socket_path)
    try:
        for words, completed in (
            (["vers"], "version"),
            (["--js"], "--json"),
            (["ps", "--gpu", "gpu"], "gpu0  gpu1"),
            (["ps", "47"], "4711"),
            (["simulate", "fau"], "fault"),
            (["simulate", "fault", "ven"], "vendor"),
            (["simulate", "fault", "gpu0", "unk"], "unknown-memory"),
            (["events", "--kind", "ven"], "vendor"),
        ):
            shell.type(" ".join(["hegmctl", *words]) + "\t")
            shell.until(completed)
            shell.type("\x15")  # the line away, for the next one
    finally:
        shell.close()

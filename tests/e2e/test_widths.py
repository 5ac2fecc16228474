"""The output in a real terminal (tmux) of 60, 80, 120 and 200 columns: no line is broken inside a word.

tmux joins the lines that it had to break itself (`capture-pane -J`). Where that makes a difference, hegmctl has written
a line that was too long.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.daemon import RunningDaemon
from tests.house.source import ROOT
from tests.patience import HANG_S
from tests.unit.hegmctl.running import command, environment

pytestmark = pytest.mark.e2e

WIDTHS = (60, 80, 120, 200)
SPEC = str(ROOT / "contrib" / "simulation" / "eight-h200.toml")
COMMANDS = (
    *("gpus", "gpus --long", "ps", "ps --ways", "jobs --all", "inspect sleep", "events", "doctor", "version", "ops"),
    *("--help", "jobs --help", "run --help", "migrate --help", "simulate --help"),
    *(
        "migrate sleep --to gpu1",
        "migrate slep --to gpu1",
        "migrate 1 --to gpu99",
        "migrate 1 --too gpu1",
        "frobnicate",
    ),
)
NARROW_GPUS = """\
GPU   NAME                   MEMORY  UTIL    POWER  HEALTH
gpu0  Imagined H200   3.0/141.0 GiB     -  -/700 W  ok
gpu1  Imagined H200   0.0/141.0 GiB     -  -/700 W  ok
gpu2  Imagined H200   0.0/141.0 GiB     -  -/700 W  ok
gpu3  Imagined H200   0.0/141.0 GiB     -  -/700 W  ok
gpu4  Imagined H200  96.0/141.0 GiB     -  -/700 W  ok
gpu5  Imagined H200               -     -        -  lost
gpu6  Imagined H200   0.0/141.0 GiB     -  -/700 W  ok
gpu7  Imagined H200   0.0/141.0 GiB     -  -/700 W  ok

gpu5 is gone: it fell off the bus, as requested
These GPUs are simulated.
"""
NARROW_JOBS = """\
JOB  NAME   STATE     GPU  VRAM  STEP/S  AGE  COMMAND
j1   sleep  starting  -       -       -  AGE  sleep 600
"""
WIDE_ERROR = """\
hegmctl: there is no job 'slep'
  → did you mean sleep? run: hegmctl jobs
"""


@contextmanager
def terminal(folder: Path, columns: int) -> Iterator[list[str]]:
    """Return the tmux command for a server of its own with one window of that width."""
    tmux = ["tmux", "-S", str(folder / f"tmux-{columns}"), "-f", "/dev/null"]
    window = [*tmux, "new-session", "-d", "-s", "seen", "-x", str(columns), "-y", "50", "sleep 600"]
    subprocess.run(window, check=True, timeout=HANG_S)
    try:
        subprocess.run([*tmux, "set-option", "-g", "history-limit", "20000"], check=True, timeout=HANG_S)
        yield tmux
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, timeout=HANG_S)


def shown(daemon: RunningDaemon, tmux: list[str], *lines: str) -> tuple[str, str]:
    """Return the terminal's contents after these commands: as shown, and with the lines joined that tmux has broken."""
    words = [" ".join(map(shlex.quote, command(*shlex.split(line)))) for line in lines]
    script = "; ".join(
        ["clear", *words, f"{' '.join([*map(shlex.quote, tmux), 'wait-for', '-S', 'done'])}", "sleep 600"]
    )
    environ = {**environment(daemon.socket_path), "LANG": "C.UTF-8", "TERM": "screen"}
    env = [part for name, value in environ.items() for part in ("-e", f"{name}={value}")]
    subprocess.run([*tmux, "new-window", "-d", "-n", "all", *env, "-c", str(ROOT), script], check=True, timeout=HANG_S)
    subprocess.run([*tmux, "wait-for", "done"], check=True, timeout=HANG_S)
    capture = [*tmux, "capture-pane", "-t", "seen:all", "-S", "-", "-p"]
    texts = [
        subprocess.run([*capture, *more], check=True, timeout=HANG_S, stdout=subprocess.PIPE, text=True).stdout
        for more in ((), ("-J",))
    ]
    subprocess.run([*tmux, "kill-window", "-t", "seen:all"], check=True, timeout=HANG_S)
    plain, joined = ["\n".join(line.rstrip() for line in text.rstrip().split("\n")) + "\n" for text in texts]
    return plain, joined


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path_factory.mktemp("w"), "--simulate", SPEC) as daemon:
        environ = environment(daemon.socket_path)
        subprocess.run(command("simulate", "fault", "5", "lost"), env=environ, check=True, cwd=ROOT, timeout=HANG_S)
        holding = [*command("simulate", "hold", "gpu0", "3GiB"), "sh", "-c", "echo holding; exec cat"]
        with (
            subprocess.Popen(holding, env=environ, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder,
            subprocess.Popen(command("run", "sleep", "600"), env=environ, cwd=ROOT) as job,
        ):
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"holding\n"
            while Path(f"/proc/{job.pid}/comm").read_text() != "sleep\n":
                assert job.poll() is None
            yield daemon
            job.kill()
            holder.communicate()


@pytest.mark.parametrize("columns", WIDTHS)
def test_no_line_is_broken_inside_a_word(node: RunningDaemon, tmp_path: Path, columns: int) -> None:
    with terminal(tmp_path, columns) as tmux:
        plain, joined = shown(node, tmux, *COMMANDS)
    assert "there is no job 'slep'" in " ".join(plain.split()), plain[-2000:]
    broken = [line for line in joined.split("\n") if len(line) > columns and len(line.split()) > 1]
    assert broken == []


def test_the_tables_are_as_they_were_drawn(node: RunningDaemon, tmp_path: Path) -> None:
    with terminal(tmp_path, 60) as narrow:
        assert shown(node, narrow, "gpus")[0] == NARROW_GPUS
        jobs = shown(node, narrow, "jobs")[0]
        assert re.sub(r" +(AGE|[0-9.]+ (?:ms|s)|1 min.*?)  ", "  AGE  ", jobs) == NARROW_JOBS
    with terminal(tmp_path, 120) as wide:
        assert shown(node, wide, "migrate slep --to gpu1")[0] == WIDE_ERROR


def test_a_pipe_gets_each_line_whole(node: RunningDaemon) -> None:
    ran = subprocess.run(
        command("events"),
        env={**environment(node.socket_path), "COLUMNS": "60"},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert any(len(line) > 60 for line in ran.stdout.splitlines()), sys.stderr
    assert all(re.match(r" +\d+  \d{4}-", line) for line in ran.stdout.splitlines())

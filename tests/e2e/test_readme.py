"""Run the commands of README and quick start: they exist, and they print what the pages say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from hegmctl.connection import connect
from tests.e2e.daemon import RunningDaemon
from tests.house.source import ROOT
from tests.looks import pause
from tests.patience import HANG_S

pytestmark = pytest.mark.e2e

README = (ROOT / "README.md").read_text()
QUICK_START = (ROOT / "docs" / "quickstart.md").read_text()
NO_DAEMON_STATUS = 3
PLACE = "/tmp/hegm-try"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", page)


def commands(console: str) -> list[tuple[str, list[str]]]:
    """Each command of a console block, with the lines that it is shown to print."""
    parts = re.split(r"(?m)^\$ (.*)\n", console)[1:]
    return [(command, output.splitlines()) for command, output in zip(parts[::2], parts[1::2], strict=True)]


def shape(line: str) -> str:
    """A line without what differs from run to run: process ids, times, the user's name, and so the widths."""
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", re.sub(r" {2,}", "  ", line.strip()))
    line = re.sub(r"^\d+  [\w-]+  gpu", "PID  USER  gpu", line)
    line = re.sub(r"^\d+  TIME", "N  TIME", line)
    return re.sub(r"process \d+", "process PID", line)


class ReadmeReader:
    """Types the lines of a console block; what they leave in the background is ended with the visit."""

    def __init__(self, folder: Path, visit: ExitStack) -> None:
        self._folder = folder
        self._visit = visit
        self._environment = dict(os.environ)

    def types(self, line: str) -> list[str]:
        line = line.replace(PLACE, str(self._folder))
        if line.startswith("export "):
            self._export(line)
        elif line.startswith("hegmd "):
            self._start_daemon(line.removesuffix(" &"))
        elif line.endswith(" &"):
            self._start_job(line.removesuffix(" &"))
        else:
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            return done.stdout.replace(str(self._folder), PLACE).splitlines()
        return []

    def thinks(self) -> None:
        """Let as much time pass as lies between two lines of a person: until the daemon looked at its node again."""
        now_utc = time.time()
        with connect(self._environment["HEGM_SOCKET"]) as hegmd:
            while hegmd.gpus().taken_utc < now_utc:
                pause()

    def _filled_in(self, words: str) -> str:
        known = {**self._environment, "PWD": str(ROOT)}
        return re.sub(r"\$(\w+)", lambda found: known[found[1]], words)

    def _export(self, line: str) -> None:
        for assignment in shlex.split(line)[1:]:
            name, _, value = assignment.partition("=")
            self._environment[name] = self._filled_in(value)

    def _start_daemon(self, line: str) -> None:
        written = shlex.split(self._filled_in(line))
        daemon = RunningDaemon(self._folder, "--simulate", str(ROOT / written[written.index("--simulate") + 1]))
        # The page's own words, started in a way that tells when it is ready.
        ours = dict(zip(daemon.command()[3::2], daemon.command()[4::2], strict=True))
        theirs = dict(zip(written[1::2], written[2::2], strict=True))
        assert ours == {**theirs, "--simulate": str(ROOT / theirs["--simulate"])}
        self._visit.enter_context(daemon)

    def _start_job(self, line: str) -> None:
        """Start it and wait until it has become the command after `--`, which it does once it holds the memory."""
        job = subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=ROOT, env=self._environment)
        self._visit.enter_context(job)
        self._visit.callback(job.terminate)
        becomes = line.partition(" -- ")[2].split()[0]
        while Path(f"/proc/{job.pid}/comm").read_text().strip() != becomes:
            assert job.poll() is None, f"ended with {job.returncode}: {line}"
            os.sched_yield()


def test_the_commands_of_the_quick_start_print_what_it_shows(socket_dir: Path) -> None:
    block = next(block for block in blocks(QUICK_START, "console") if "hegmctl gpus" in block)
    with ExitStack() as visit:
        visitor = ReadmeReader(socket_dir, visit)
        for line, shown in commands(block):
            if line == "hegmctl gpus":
                visitor.thinks()
            printed = [shape(text) for text in visitor.types(line)]
            expected = [shape(text) for text in shown]
            if "..." in expected:  # an excerpt
                assert set(expected) - {"..."} <= set(printed), line
            else:
                assert printed == expected, line


def test_the_first_visit_can_be_pasted_as_a_whole(socket_dir: Path) -> None:
    """The jobs were asked for before the daemon listened, and not started."""
    block = next(block for block in blocks(QUICK_START, "console") if "hegmctl gpus" in block)
    typed = [line.replace(PLACE, str(socket_dir)) for line, _ in commands(block)]
    script = "\n".join([*typed[: typed.index("hegmctl gpus")], "kill $(jobs -p)", "wait"])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert "gpu5: lost" in done.stdout
    assert "hegmctl: " not in done.stderr


def test_ten_lines_lead_from_installation_to_a_migrated_job(socket_dir: Path) -> None:
    block = next(block for block in blocks(QUICK_START, "console") if "migrate first" in block)
    typed = [line.replace(PLACE, str(socket_dir)) for line, _ in commands(block)]
    assert len(typed) <= 10
    assert typed[0] == "tools/setup.sh dev"  # has been done: these tests run in what it has made
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "set -m\n" + "\n".join([*typed[1:], "wait"])],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * HANG_S,
    )
    result = [line.split() for line in done.stdout.splitlines()]
    places = [line[3] for line in result if line[:3] == ["j1", "first", "training"]]
    assert places == ["gpu0", "gpu1"], done.stdout + done.stderr
    assert "migrate of" in done.stdout
    assert "done (gpu0 -> gpu1" in done.stdout


def test_the_python_example_runs(socket_dir: Path) -> None:
    (example,) = blocks(README, "python")
    with RunningDaemon(socket_dir) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", example],
            env=os.environ | {"HEGM_SOCKET": str(daemon.socket_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"gpu{n} Simulated GPU 0 {8 << 30}" for n in (0, 1)]


@pytest.mark.parametrize("page", [README, QUICK_START], ids=["README", "quick start"])
def test_each_command_that_is_shown_exists(page: str, tmp_path: Path) -> None:
    """Without a daemon each one fails for that reason alone; an unknown command or option has another status.

    `run` would start a daemon, and `doctor` works without one: other tests run these two.
    """
    typed = [line.partition("#")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    commands = [line for line in typed if re.match(r"hegmctl (?!run |doctor)", line)]
    assert commands
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "HEGM_SOCKET": str(tmp_path / "none.sock")}
    ended = {}
    for line in commands:
        command = ["bash", "-c", line]
        ended[line] = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, check=False).returncode
    assert {line: status for line, status in ended.items() if status != NO_DAEMON_STATUS} == {}

"""`python -m tests.bench.restarts`: the same trainings restarted by HeGM 0.3.3 and by ours, one after the other.

Each script of `tests/bench/restarted/` prints a line for each batch: what is in it, the learning rate, the loss and
whatever else has to continue. It runs once undisturbed and once under each launcher, which both are used in HeGM's way:
`hegm-launcher COMMAND`, SIGUSR1 to the worker after some batches of the second epoch, and the lock file taken away once
it is there. What the second worker prints is held against the rest of the undisturbed run; since HeGM's leaves in the
middle of a batch, that batch may be there twice or not at all.

HeGM is taken from a folder that it was installed to (`pip install --no-deps --target build/hegm-0.3.3 hegm==0.3.3`). It
runs twice: as it is, and with HEGM_DISABLE_EPOCH_RANGE_PATCH=1, without which PyTorch of today does not start.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from typing_extensions import Self

from tests.bench.machine import this_machine

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "bench" / "restarted"
HEGM = ROOT / "build" / "hegm-0.3.3"
NAMES = ("shuffled", "scaled", "compiled", "evaluated", "adversaries", "augmented", "trained", "large")
NEEDS = {"trained": ("transformers", "accelerate")}
# Epochs are of 30 batches, the Trainer's too; the one of `large` is of 10, which take long enough.
SECOND_EPOCH = range(33, 57)
FIRST_EPOCH = range(3, 7)
LATEST_S = 120.0
COLUMNS = ("starts", "order", "schedule", "numbers", "seconds")


class Way(NamedTuple):
    """A launcher, as it is started."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]


class Outcome(NamedTuple):
    """The result of a restart: `seconds` from the request to the next batch, or `why` it did not continue."""

    starts: bool
    order: bool | None = None
    schedule: bool | None = None
    numbers: bool | None = None
    seconds: float | None = None
    why: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the status is 1 when anything of ours was not kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.restarts", description="Restarts beside HeGM's.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; all if none is named")
    parser.add_argument("--hegm", type=Path, default=HEGM, metavar="DIR", help="where HeGM 0.3.3 was installed to")
    parser.add_argument("--seed", type=int, default=1, help="for the batches at which the restarts are asked for")
    arguments = parser.parse_args(argv)
    names = [name for name in arguments.names or NAMES if all(map(find_spec, NEEDS.get(name, ())))]
    ways = [*_of_hegm(arguments.hegm), _ours()]
    found: dict[str, list[Outcome]] = {}
    for name in names:
        at = random.Random(f"{arguments.seed} {name}").choice(FIRST_EPOCH if name == "large" else SECOND_EPOCH)
        undisturbed = _undisturbed(name)
        found[name] = [_restarted(name, way, at, undisturbed) for way in ways]
        for way, outcome in zip(ways, found[name], strict=True):
            print(f"{name}, at batch {at}, {way.name}: {outcome}", file=sys.stderr, flush=True)
    print("  \n".join(this_machine().lines()), "", _table(ways, found), sep="\n")
    return 0 if all(outcomes[-1].numbers and outcomes[-1].schedule for outcomes in found.values()) else 1


def _of_hegm(folder: Path) -> list[Way]:
    if not (folder / "hegm").is_dir():
        print(f"no HeGM in {folder}: pip install --no-deps --target {folder} hegm==0.3.3", file=sys.stderr)
        return []
    start = (sys.executable, "-c", "from hegm.launcher import main_cli; raise SystemExit(main_cli())")
    path = {"PYTHONPATH": str(folder)}
    return [
        Way("HeGM 0.3.3", start, path),
        Way("HeGM 0.3.3, `range` not patched", start, {**path, "HEGM_DISABLE_EPOCH_RANGE_PATCH": "1"}),
    ]


def _ours() -> Way:
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
    return Way("hegmd", (sys.executable, "-m", "hegmcompat.launcher_cli"), path)


# ---- one run --------------------------------------------------------------------------------------------------------


def _command(name: str) -> list[str]:
    return [sys.executable, "-u", str(SCRIPTS / f"{name}.py")]


def _environ(more: Mapping[str, str]) -> dict[str, str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HEGM_", "PYTHON"))}
    return {**plain, "TOKENIZERS_PARALLELISM": "false", **more}


def _undisturbed(name: str) -> list[str]:
    run = subprocess.run(_command(name), env=_environ({}), capture_output=True, text=True, check=True)
    return _batches(run.stdout)


def _batches(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("batch ")]


def _restarted(name: str, way: Way, at: int, undisturbed: list[str]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="restarts-", dir="/tmp") as folder:
        more = {"HEGM_CHECKPOINT_DIR": folder, "HEGM_CTRL_PORT": str(_free_port()), "HEGM_POLL_INTERVAL": "0.1"}
        with _Launched([*way.argv, *_command(name)], _environ({**way.environ, **more}), Path(folder)) as launched:
            return _judge(launched, at, undisturbed)


def _judge(launched: _Launched, at: int, undisturbed: list[str]) -> Outcome:
    if not launched.read_until(at):
        return Outcome(starts=bool(launched.lines), why=launched.last_words())
    asked_s = monotonic()
    os.kill(launched.worker(), signal.SIGUSR1)
    if not launched.take_lock():
        return Outcome(starts=True, why=launched.last_words())
    before = len(launched.lines)
    if not launched.read_until(before + 1):
        return Outcome(starts=True, order=False, schedule=False, numbers=False, why=launched.last_words())
    seconds = monotonic() - asked_s
    launched.read_until(None)
    rest = [line.split(" ") for line in launched.lines[before:]]
    kept = [_kept(rest, [line.split(" ") for line in undisturbed[begin:]]) for begin in range(before - 1, before + 2)]
    order, schedule, numbers = max(kept)
    return Outcome(True, order, schedule, numbers, seconds)


def _kept(rest: list[list[str]], expected: list[list[str]]) -> tuple[bool, bool, bool]:
    """Whether the batches, the rates, and all that is printed are those of the undisturbed run."""
    columns = [[[line[place] for line in lines] for place in (1, 2)] for lines in (rest, expected)]
    return columns[0][0] == columns[1][0], columns[0][1] == columns[1][1], rest == expected


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class _Launched:
    """A launcher with its worker, and the batches that it has printed so far."""

    def __init__(self, argv: list[str], environ: dict[str, str], folder: Path) -> None:
        self._folder = folder
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0,
            start_new_session=True,
        )  # fmt: skip
        self._heard = b""
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own, with the worker in it
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def worker(self) -> int:
        """The training's process."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def read_until(self, count: int | None) -> bool:
        """Read until there are so many batches, or until the end; whether there are.

        Each batch has its time: a script with workers took longer for all of them together on a busy machine, and had
        no result.
        """
        assert self._process.stdout is not None
        ends_s, observed = monotonic() + LATEST_S, len(self.lines)
        while count is None or len(self.lines) < count:
            if len(self.lines) > observed:
                ends_s, observed = monotonic() + LATEST_S, len(self.lines)
            if not select.select([self._process.stdout], [], [], max(0.0, ends_s - monotonic()))[0]:
                return False
            if not self._read(1 if count is not None else 1 << 16):
                return count is None
        return True

    def _read(self, most: int) -> bool:
        """Read what there is, so much at most; whether it was not the end."""
        assert self._process.stdout is not None
        part = os.read(self._process.stdout.fileno(), most)
        whole, newline, self._heard = (self._heard + part).rpartition(b"\n")
        if newline:
            self.lines += _batches(whole.decode())
        return bool(part)

    def take_lock(self) -> bool:
        """Wait for the lock and take it away, as a controller does; what is printed meanwhile is read.

        Not until the next batch: a Trainer's log was its last line before it left, and another line was waited for.
        """
        lock = self._folder / str(self._process.pid) / "lock"
        assert self._process.stdout is not None
        ends_s = monotonic() + LATEST_S
        while not lock.exists():
            if monotonic() > ends_s or self._process.poll() is not None:
                return False
            if select.select([self._process.stdout], [], [], 0.02)[0]:
                self._read(1)
        lock.unlink()
        return True

    def last_words(self) -> str:
        """Return the end of what the process wrote to standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:160] if lines else f"ended with {self._process.poll()}"


# ---- the table ------------------------------------------------------------------------------------------------------


def _table(ways: Sequence[Way], found: Mapping[str, Sequence[Outcome]]) -> str:
    lines = ["| script | by | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for name, outcomes in found.items():
        for way, outcome in zip(ways, outcomes, strict=True):
            text = " | ".join(_word(value) for value in outcome[: len(COLUMNS)])
            lines.append(f"| {name} | {way.name} | {text} |")
    return "\n".join(lines)


def _word(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.1f} s"
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.exit(main())

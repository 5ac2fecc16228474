"""Runs `make test-gpu` and `make bench-gpu`: one program after the other, in the time there is, and on from there.

    PYTHONPATH=.:client python3 -m tests.gpu.in_turn test|bench [--state DIR] [--budget-s N] [--only PART,...] [--list]
                                                                 [-- PART WORD...]...

Time on machines with GPUs is lent in pieces. With --state, a folder, a part that ended is not begun again,
and one that was cut continues where it was, by a file of its own in there; the folder is for one revision. No part is
begun that the time left is too short for, and each is told what is left. What a part prints is seen as it comes, so a
call that is cut off has shown all figures until then. `-- images --sizes 1` hands words on to a part.

`bench` ends with the table of `rows_table`, and writes it to docs/measurements; `--only rows,images,restart` has all
that it needs.

Ends with 0 when all parts have come to their end and none went wrong. Needs what its parts need, and no pytest but for
the part of that name. Runs over the stub driver with the environment of a CudaNode, as far as its parts do.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import compileall
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.gpu.rows_table import show_rows

# After its budget a part may take so much longer for what it has begun, and is ended then.
GRACE_S = 150.0
# An installation has these compiled: otherwise some machines compile them at each start of the daemon.
COMPILED = ("hegmd", "client")
# Below this nothing is begun that looks to its time by itself.
SHORT_S = 20.0


@dataclass(frozen=True)
class Part:
    """One program. A `resumed` one knows `--state FILE` and `--budget-s N`; another runs whole or not at all."""

    name: str
    words: tuple[str, ...]
    resumed: bool = True
    takes_s: float = SHORT_S


def _module(name: str, *words: str) -> tuple[str, ...]:
    return ("-m", f"tests.gpu.{name}", *words)


PARTS: dict[str, tuple[Part, ...]] = {
    "test": (
        Part("driver", _module("driver_run")),
        Part("moves", _module("moves_run")),
        Part("zoo", _module("zoo_run")),
        Part("images", _module("image_run", "--repeat", "1")),
        Part("restarts", _module("restarts_run")),
        Part("agent", _module("agent_run"), resumed=False, takes_s=120.0),
        Part(
            "pytest",
            ("-m", "pytest", "-m", "gpu", "-ra", "tests/gpu", "--ignore=tests/gpu/test_driver_contract.py"),
            resumed=False,
            takes_s=60.0,
        ),
    ),
    "bench": (
        Part("rows", _module("bench_moves", "--rows")),
        Part("images", _module("image_run")),
        Part("restart", _module("bench_restart")),
        Part("moves", _module("bench_moves")),
        Part("inventory", _module("inventory_run"), resumed=False, takes_s=90.0),
    ),
}


class RunParts:
    """The parts of one kind, and what is known of earlier calls."""

    def __init__(self, folder: Path, budget_s: float, more: dict[str, list[str]]) -> None:
        self._folder, self._more = folder, more
        self._ends = time.monotonic() + budget_s
        self._done = folder / "done.json"
        self.ended: dict[str, int] = json.loads(self._done.read_text()) if self._done.exists() else {}

    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def run(self, kind: str, part: Part) -> str:
        """Run it; return its state in a word or two."""
        key = f"{kind}-{part.name}"
        if key in self.ended:
            return "ended before" if not self.ended[key] else "went wrong before"
        if part.name == "pytest" and find_spec("pytest") is None:
            return "left out: there is no pytest"
        if self.left_s() < part.takes_s:
            return f"left for another time: it takes {part.takes_s:.0f} s"
        print(f"==== {key}: {self.left_s():.0f} s left", flush=True)
        status = self._run(key, part)
        # A program that is cut also exits with a status, and its own file has its state; the next call queries it
        # again.
        if status == 0 or not part.resumed:
            self.ended[key] = status
            self._done.write_text(json.dumps(self.ended))
        return "ok" if status == 0 else f"ended with status {status}"

    def _run(self, key: str, part: Part) -> int:
        words = [sys.executable, *part.words]
        if part.resumed:
            words += ["--state", str(self._folder / f"{key}.jsonl"), "--budget-s", f"{max(1.0, self.left_s()):.0f}"]
        words += self._more.get(part.name, [])
        within_s = max(self.left_s(), part.takes_s) + GRACE_S
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            print(f"{key} did not finish within {within_s:.0f} s and is ended", flush=True)
            process.terminate()
            try:
                return process.wait(GRACE_S / 10) or 124
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait() or 124
        except BaseException:
            process.terminate()  # as this program is; what it has begun it tidies up
            process.wait()
            raise


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(PARTS))
    parser.add_argument("--state", type=Path, help="a folder for what is done; made if not there")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="begin nothing after so long")
    parser.add_argument("--only", default="", metavar="PARTS", help="these parts, with commas")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("more", nargs="*", metavar="-- PART WORD...", help="words for a part; again for another")
    first, *others = _split(argv)
    options = parser.parse_args(first)
    options.more = {words[0]: words[1:] for words in others if words}
    names = [part.name for part in PARTS[options.kind]]
    options.only = [name for name in options.only.split(",") if name]
    for name in (*options.more, *options.only):
        if name not in names:
            parser.error(f"there is no part {name!r} in {options.kind}: there are {', '.join(names)}")
    return options


def _split(argv: Sequence[str]) -> list[list[str]]:
    """The words, cut at each `--`."""
    cut: list[list[str]] = [[]]
    for word in argv:
        if word == "--":
            cut.append([])
        else:
            cut[-1].append(word)
    return cut


def main(argv: Sequence[str]) -> int:
    options = parsed(argv)
    parts = [part for part in PARTS[options.kind] if not options.only or part.name in options.only]
    if options.list:
        print("\n".join(f"{part.name}: python3 {' '.join(part.words)}" for part in parts))
        return 0
    for name in COMPILED:
        compileall.compile_dir(Path(__file__).parents[2] / name, quiet=1)
    with ExitStack() as held:
        folder = options.state or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-in-turn-")))
        folder.mkdir(parents=True, exist_ok=True)
        turns = RunParts(folder, options.budget_s, options.more)
        output = {part.name: turns.run(options.kind, part) for part in parts}
        if options.kind == "bench":
            show_rows(folder, f"python3 -m tests.gpu.in_turn {' '.join(argv)}")
    print("\n" + "\n".join(f"{name:10} {how}" for name, how in output.items()))
    return int(any(how not in {"ok", "ended before"} for how in output.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

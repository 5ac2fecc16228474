"""Changes one place of the product at a time and looks whether a test notices: `make mutants`.

A mutant is one small change to a copy of the tree (`mutations.py`). The tests of its area run on it
(`mutant_tests.py`). If they all pass, it survives: a test is missing, or the change makes no difference to anybody. The
same seed makes the same mutants from the same tree.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.equivalent_mutants import EQUIVALENT
from tools.mutant_tests import AreaTests, BrokenTestsError
from tools.mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
#: The mutated files, by area, and their tests.
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "migration": (
        (
            "hegmd/migration/*.py",
            "hegmd/migration/journal/*.py",
            "hegmd/migration/machine/*.py",
            "hegmd/migration/plan/*.py",
            "hegmd/migration/run/*.py",
        ),
        ("tests/unit/migration", "tests/simulation"),
    ),
    "methods": (
        ("hegmd/migration/methods/*.py", "hegmd/migration/carriers/*.py"),
        (
            "tests/unit/migration",
            "tests/contract/test_carriers*.py",
            "tests/contract/test_communicators.py",
            "tests/contract/test_crowded.py",
            "tests/contract/test_driver_*.py",
            "tests/contract/test_methods.py",
            "tests/contract/test_neighbours.py",
            "tests/contract/test_simulated.py",
            "tests/contract/test_state_video.py",
        ),
    ),
    "agent": (
        ("hegmd/agent/**/*.py",),
        (
            "tests/unit/agent",
            "tests/contract/test_agent_peers.py",
            "tests/contract/test_communicators.py",
            "tests/contract/test_shown.py",
            "tests/contract/test_state_video.py",
            "tests/unit/hegmcompat/test_launcher.py",
            "tests/unit/hegmctl/test_agentless.py",
            "tests/unit/hegmctl/test_enabling.py",
            "tests/unit/hegmctl/test_isolation.py",
            "tests/unit/test_rank_states.py",
        ),
    ),
    "image": (
        ("hegmd/images/files/**/*.py",),
        ("tests/unit/images/files", "tests/unit/images/test_dump_job.py", "tests/unit/images/test_restore_job.py"),
    ),
    "pool": (
        ("hegmd/memory/pool*.py", "hegmd/memory/spill*.py"),
        (
            "tests/unit/memory",
            "tests/unit/test_piece_sizes.py",
            "tests/unit/test_pool_on_disk.py",
            "tests/unit/test_found_descriptors.py",
        ),
    ),
    "server": (("hegmd/server/**/*.py",), ("tests/unit/server", "tests/unit/test_app.py")),
    "protocol": (
        ("hegmd/protocol/**/*.py",),
        ("tests/unit/protocol", "tests/unit/server", "tests/unit/workers", "tests/unit/hegmctl/test_wire.py"),
    ),
}


def sample(root: Path, areas: Sequence[str], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """Draw so many mutants, the same number of each area if possible. A change of the tree replaces few of them: their
    order depends on their own lines alone.
    """
    chosen: list[tuple[str, Mutant]] = []
    for at, area in enumerate(areas):
        every = [mutant for path in paths_of(root, area) for mutant in mutants_of(path, (root / path).read_text())]
        share = count // len(areas) + (at < count % len(areas))
        every.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.change}".encode()).digest())
        chosen += [(area, one) for one in itertools.islice(filter(lambda one: one.can_run, every), share)]
    return chosen


def paths_of(root: Path, area: str) -> list[Path]:
    """The files of an area, relative to the root."""
    return sorted({path.relative_to(root) for pattern in AREAS[area][0] for path in root.glob(pattern)})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Look which small changes of the product no test notices.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", choices=list(AREAS), action="append", help="an area; may be given several times")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=900.0, help="a run that takes longer counts as a failure")
    options = parser.parse_args(argv)
    areas = options.only or list(AREAS)
    chosen = sample(ROOT, areas, options.count, options.seed)
    tallies: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory(prefix="hegm-mutants-", ignore_cleanup_errors=True) as folder:
        for area in areas:
            mutants = [mutant for of, mutant in chosen if of == area]
            try:
                tallies[area] = judge(area, mutants, Path(folder), options.jobs, options.limit_s)
            except BrokenTestsError as error:
                print(f"without any change the tests of {area} fail: {error}")
                return 2
    print(f"seed {options.seed}: found, survived, equivalent")
    for area, tally in (tallies | {"all": Tally.sum_of(tallies.values())}).items():
        print(f"{area:10}{tally}")
    return 1 if any(tally.survived for tally in tallies.values()) else 0


@dataclass
class Tally:
    """How many mutants tests found, how many no test found, and how many make no difference."""

    found: int = 0
    survived: int = 0
    equivalent: int = 0

    @classmethod
    def sum_of(cls, tallies: Iterable[Tally]) -> Tally:
        columns = zip(*(dataclasses.astuple(tally) for tally in tallies), strict=True)
        return cls(*map(sum, columns))

    def __str__(self) -> str:
        share = self.found / max(1, self.found + self.survived)
        return f"{self.found:5}{self.survived:5}{self.equivalent:5}   {share:.0%}"


def judge(area: str, mutants: Sequence[Mutant], folder: Path, jobs: int, limit_s: float) -> Tally:
    """Print the verdict on each of these mutants of an area, and count them."""
    tally = Tally()
    with contextlib.closing(AreaTests(ROOT, AREAS[area][1], [one.path for one in mutants], folder, limit_s)) as tests:
        for test in tests.failing:
            print(f"left out, because it fails without any change: {test}")
        for mutant in mutants:
            if mutant.change in EQUIVALENT:
                tally.equivalent += 1
                print(f"equal    {mutant.path}:{mutant.line} {mutant.what} ({EQUIVALENT[mutant.change]})")
        for mutant, verdict in tests.judge([one for one in mutants if one.change not in EQUIVALENT], jobs):
            tally.survived += verdict.survived
            tally.found += not verdict.survived
            print(f"{verdict} {mutant.path}:{mutant.line} {mutant.what} {verdict.by}", flush=True)
            if verdict.survived:
                print(mutant.diff(), flush=True)
    return tally


if __name__ == "__main__":
    sys.exit(main())

"""One command for a machine with two NVIDIA GPUs: do jobs come back whole from images, and what does that take?

    PYTHONPATH=.:client python3 -m tests.gpu.image_run [--state FILE] [--budget-s N] [--criu PATH] [--sizes 1,8,32]
                                                       [--disk DIR] [--repeat N] [--only NAME,...] [--list] [--table]
                                                       [--ready-gib N] [--no-read-back]

Starts a hegmd and trainings under `hegmctl run`; has them written into images on a tmpfs and on a disk, ended, and
brought back on the other GPU. Every line that a training ever wrote has to be the one of an undisturbed run, bit for
bit, and NVML has to have it where it belongs and nowhere else. What that took is split, beside what dd reaches in the
same place, and beside the driver and CRIU alone, when all video memory goes through CRIU's files (`--carrier driver`).

The cases, each of so many GiB (`8`) and in a place: `back-8-tmpfs`, `back-8-disk`, `left-8-tmpfs` (--leave-running),
`left-8-disk`, `driver-8-tmpfs` and `driver-8-disk` (the driver and CRIU alone), `workers` (with processes of its
DataLoader) and `taken` (its GPU was given to somebody else). A name with `.2` and `.3` is the same once more, for
medians. --only takes what names begin with. They are in the order in which they are worth their time, and all of them
once take about eight minutes where a disk writes 1.5 GB/s, 32 GiB by the driver and CRIU alone two of these: one call
with `--repeat 1` has every size on both, beside dd and beside the driver and CRIU alone. These are on the disk only at
32 GiB: on a tmpfs the node would have it three times, in the process, in the image and in the pool's huge pages.

With --state, a file with a line of JSON for all that was done, it continues where it was cut. Needs root, torch,
psutil and pynvml; CRIU as --criu says, else from build/criu (`make criu`; it may be carried from another machine), else
the node's own. Runs over the stub driver with the environment of a CudaNode, with real CRIU.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from hegmd.errors import HegmError
from tests.gpu.bench_record import huge_pages, unwinding
from tests.gpu.image_jobs import Job, Jobs, Kind
from tests.gpu.image_record import DRIVER, GIB, Record
from tests.gpu.image_rounds import Place, Rounds
from tests.gpu.moves_jobs import on_stub
from tests.gpu.moves_node import ROOT, SHARED_MEMORY, Node, WentWrongError

UNPACKED = ROOT / "build" / "criu" / "bin" / "criu"
# More than so many GiB through CRIU alone take much of the time there is, and memory: that is done once, on the disk.
DRIVER_FEW_GIB = 8
# A case takes about so long beside its bytes, and by the driver so many go in a second, out and back.
CASE_S = 4.0
CASE_MOST_S = 4.0 if on_stub() else 40.0
DRIVER_BYTES_PER_S = 0.8e9
TMPFS_BYTES_PER_S = 2.0e9


@dataclass(frozen=True)
class Case:
    """One way of one training. `use` tells trainings of a kind apart: what the driver took once is not shown again.
    `passes` are how often its bytes go to the place or come from it: written, read back, and read for the restore."""

    name: str
    kind: Kind
    place: str
    run: Callable[[Rounds, Job, Place], None]
    use: str = ""
    passes: int = 3


def needed_s(case: Case, bytes_per_s: float) -> float:
    """Return the estimated time in a place of that speed; the driver's copies come on top."""
    size_bytes = case.kind.size_gib * GIB
    by_driver_s = size_bytes / DRIVER_BYTES_PER_S if case.use == DRIVER else 0.0
    return CASE_S + case.passes * size_bytes / bytes_per_s + by_driver_s


def cases_of(sizes: list[int], repeat: int) -> dict[str, Case]:
    """All of them, the most telling first, and once each before any is done again."""
    least, few = Kind(min(sizes)), [size for size in sizes if size <= DRIVER_FEW_GIB]
    cases: list[Case] = []
    for count in range(1, repeat + 1):
        again = f".{count}" if count > 1 else ""
        stays, comes_back = partial(Rounds.left_running, back=False), partial(Rounds.left_running, back=True)
        by_driver = partial(Rounds.there_and_back, carrier=DRIVER)
        cases += [Case(f"back-{size}-tmpfs{again}", Kind(size), "tmpfs", Rounds.there_and_back) for size in sizes]
        if count == 1:
            with_workers = Kind(least.size_gib, workers=True)
            cases += [Case("workers", with_workers, "tmpfs", Rounds.there_and_back)]
            cases += [Case("taken", least, "tmpfs", Rounds.onto_a_taken_gpu)]
        for size in sizes:  # one image of this kind is enough to see a job return: the code is the same for any size
            left, passes = (comes_back, 3) if (count, size) == (1, least.size_gib) else (stays, 2)
            cases += [Case(f"left-{size}-tmpfs{again}", Kind(size), "tmpfs", left, passes=passes)]
        cases += [Case(f"driver-{size}-tmpfs{again}", Kind(size), "tmpfs", by_driver, DRIVER) for size in few]
        cases += [Case(f"back-{size}-disk{again}", Kind(size), "disk", Rounds.there_and_back) for size in sizes]
        driven = [size for size in sizes if size in few or count == 1]
        cases += [Case(f"driver-{size}-disk{again}", Kind(size), "disk", by_driver, DRIVER) for size in driven]
        cases += [Case(f"left-{size}-disk{again}", Kind(size), "disk", stays, passes=2) for size in reversed(sizes)]
    return {case.name: case for case in cases}


class Run:
    """The cases one after the other, as far as the time goes."""

    def __init__(self, rounds: Rounds, jobs: Jobs, places: dict[str, Place], ends: float) -> None:
        self.rounds, self.jobs, self.places, self.ends = rounds, jobs, places, ends
        self.record = rounds.record
        self._rates = {"tmpfs": TMPFS_BYTES_PER_S}

    def run(self, cases: list[Case]) -> list[str]:
        """The names of those that there was no time or no place for."""
        for case in cases:
            self.jobs.begin(case.kind, case.use)
        left: list[str] = []
        last = ""
        self.jobs.settle()
        for case in cases:
            place = self.places[case.place]
            if case.place != last:
                last = case.place
                self._rates[last] = self.rounds.measure_dd(place)
            why = self._against(case, place)
            if why:
                left.append(case.name)
                self.record.say(f"{case.name} is left for another time: {why}")
            else:
                self._one(case, place)
        return left

    def _against(self, case: Case, place: Place) -> str:
        needed_s = self.needed_s(case)
        if time.monotonic() + needed_s > self.ends:
            return f"it takes about {needed_s:.0f} s"
        wanted_bytes = case.kind.size_gib * GIB * 9 // 8 + GIB
        if place.free_bytes < wanted_bytes and not on_stub():
            return f"{place.folder} has {place.free_bytes >> 30} GiB free, and {wanted_bytes >> 30} are wanted"
        return ""

    def needed_s(self, case: Case) -> float:
        """Return the time it took before, or an estimate."""
        before_s = self.record.took_s(case.name)
        if before_s is not None:
            return before_s
        return CASE_S if on_stub() else needed_s(case, min(self._rates[case.place], TMPFS_BYTES_PER_S))

    def _one(self, case: Case, place: Place) -> None:
        began, wrong = time.monotonic(), ""
        signal.alarm(int(CASE_MOST_S + 4 * self.needed_s(case)))
        try:
            case.run(self.rounds, self.jobs.ready(case.kind, case.use), place)
        except (WentWrongError, HegmError, CaseTimeout) as error:
            wrong = str(error)
        except Exception as error:  # noqa: BLE001 - the cases after it are worth their time on such a machine
            traceback.print_exc()
            wrong = f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
        self.record.note(case.name, wrong, time.monotonic() - began)
        if wrong:
            node = self.rounds.node
            print(f"{self._operations()}\n{node.log_tail(40)}", flush=True)
            self.jobs.end(case.kind, case.use)
            if node.daemon.poll() is not None:
                self.jobs.end_all()
                node.renew()

    def _operations(self) -> str:
        """Return the daemon's operations."""
        with contextlib.suppress(WentWrongError):
            operations = self.rounds.node.hegmctl("ops")["operations"]
            return "\n".join(f"operation {op['id']}: {op['phase']}, {op['failure']}" for op in operations[-2:])
        return "the daemon does not answer"


class CaseTimeout(Exception):
    """A case took longer than any may."""


def _overdue(_: int, __: FrameType | None) -> None:
    raise CaseTimeout("it took longer than it may")


@contextlib.contextmanager
def places_for(disk: Path, largest_gib: int) -> Iterator[dict[str, Place]]:
    """A folder on that disk, and one in memory: where /dev/shm is too small, on a file system of its own."""
    with ExitStack() as held:
        on_disk = Path(held.enter_context(tempfile.TemporaryDirectory(dir=disk, prefix="hegm-images-")))
        in_memory = Path(held.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="hegm-images-")))
        if Place("tmpfs", in_memory).free_bytes < (largest_gib * GIB * 9 // 8 + GIB) and not on_stub():
            in_memory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-images-")))
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={largest_gib + 8}g", "none", in_memory], check=True)
            held.callback(lambda: subprocess.run(["umount", in_memory], check=True))
        yield {"disk": Place("disk", on_disk), "tmpfs": Place("tmpfs", in_memory)}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help="a file of what is done, a line of JSON each; made if not there")
    parser.add_argument("--budget-s", type=float, default=540.0, help="begin nothing that would end after so long")
    parser.add_argument("--criu", type=Path, help="the CRIU to use")
    parser.add_argument("--sizes", default="1,8,32", help="in GiB")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder on the disk to measure")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", metavar="NAMES", help="what begins with one of these, with commas")
    parser.add_argument("--ready-gib", type=int, default=0, help="ready memory of the pool, and a helper with contexts")
    parser.add_argument("--no-read-back", action="store_true", help='with images.verify = "off"')
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--table", action="store_true", help="the tables of the state, and nothing else")
    return parser.parse_args()


def wanted(options: argparse.Namespace, record: Record) -> list[Case]:
    """Return the requested cases that are not done yet."""
    words = tuple(filter(None, options.only.split(",")))
    cases = cases_of([int(text) for text in options.sizes.split(",")], options.repeat)
    return [case for name, case in cases.items() if not record.is_done(name) and (not words or name.startswith(words))]


def criu_settings(criu: Path | None, *, read_back: bool = True) -> str:
    """hegmd's settings for images; without a CRIU, it takes the one of the node."""
    found = "" if criu is None else f'criu = "{criu.resolve()}"\n'
    return f"[images]\n{found}" + ("" if read_back else 'verify = "off"\n')


def main() -> int:
    options = parsed()
    ends = time.monotonic() + options.budget_s
    record = Record(options.state)
    cases = wanted(options, record)
    if options.list or options.table:
        print(record.markdown() if options.table else "\n".join(case.name for case in cases))
        return 0
    criu = options.criu or (UNPACKED if UNPACKED.exists() else None)
    images = criu_settings(criu, read_back=not options.no_read_back)
    ready = f'ready_bytes = {options.ready_gib * GIB}\nready_helper = "contexts"\n' if options.ready_gib else ""
    signal.signal(signal.SIGALRM, _overdue)
    with ExitStack() as held:
        held.enter_context(unwinding())
        largest_gib = max((case.kind.size_gib for case in cases), default=1)
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-image-run-")))
        places = held.enter_context(places_for(options.disk, largest_gib))
        held.enter_context(huge_pages(record, largest_gib))
        node = held.enter_context(Node(folder, log_level="debug", settings=ready + images))
        node.wait_until_ready()
        print(f"driver {node.gpus.driver}, {len(node.gpus)} GPUs, {len(cases)} cases, CRIU {criu or 'of the node'}")
        jobs = Jobs(node, folder / "jobs")
        held.callback(jobs.close)
        rounds = Rounds(node, record)
        held.callback(rounds.close)
        left = Run(rounds, jobs, places, ends).run(cases)
    print("\n" + record.markdown())
    print(f"\n{len(left)} not run: {' '.join(left) or '-'}")
    return int(record.wrong or bool(left))


if __name__ == "__main__":
    sys.exit(main())

"""The figures of the benchmark of moves, a line of JSON each, so that a later call continues from there.

Owns the file and the Markdown that is made of it; and the host memory that is there before anything is measured.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import anyio

from hegmd.memory.pool import Key, Pool
from tests.gpu.moves_jobs import on_stub
from tests.gpu.moves_timing import Measured, parts_table, table
from tests.gpu.moves_verdicts import verdicts

GIB = 1 << 30
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


class Reporter(Protocol):
    """Prints sentences."""

    def say(self, text: str, *, keep: bool = True) -> None: ...


class Record:
    """Figures, sentences, and what is done. `wrong` tells whether anything in this call went wrong."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.measured: list[Measured] = []
        self.remarks: list[str] = []
        self.wrong = False
        self._done: set[str] = set()
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            self._take(json.loads(line))

    def _take(self, result: dict[str, Any]) -> None:
        if "measured" in result:
            self.measured.append(Measured(**result["measured"]))
        elif "told" in result:
            self.remarks.append(result["told"])
        else:
            self._done.add(result["done"])

    def _keep(self, result: dict[str, Any]) -> None:
        self._take(result)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(result) + "\n")

    def measure(self, measured: Measured) -> None:
        self._keep({"measured": asdict(measured)})
        parts = ", ".join(f"{name} {value:.3f}" for name, value in measured.split.items())
        rates = ", ".join(f"{name} at {value / 1e9:.1f} GB/s" for name, value in measured.rates.items())
        what = f"{measured.size_gib} GiB {measured.action} {measured.carrier} {measured.where}"
        print(f"  {what}: {measured.took_s:.3f} s ({parts}) {rates}", flush=True)

    def say(self, text: str, *, keep: bool = True) -> None:
        """A sentence; one that is kept is among the results."""
        if keep:
            self._keep({"told": text})
        print(text, flush=True)

    def went_wrong(self, what: str, error: BaseException) -> None:
        self.wrong = True
        self.say(f"{what} WENT WRONG: {type(error).__name__}: {error}")

    def done(self, name: str) -> None:
        self._keep({"done": name})

    def is_done(self, name: str) -> bool:
        return name in self._done

    def count(self, size_gib: int, action: str, carrier: str, where: str | None = None) -> int:
        """How often that was measured; there, or anywhere."""
        wanted = (size_gib, action, carrier)
        return sum((one.key[:3]) == wanted and where in {None, one.where} for one in self.measured)

    def markdown(self) -> str:
        """Return the Markdown for docs/benchmarks.md."""
        remarks = [*verdicts(self.measured), *self.remarks]
        return "\n".join([table(self.measured), "", parts_table(self.measured), "", *(f"* {text}" for text in remarks)])


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """In the block SIGTERM ends the program as Ctrl-C does: all that was made for it is given back, the pages too."""

    def end(number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def huge_pages(record: Reporter, size_gib: int) -> Iterator[None]:
    """As many 2 MiB pages as the pool takes for so much, as far as they can be had."""
    if on_stub() or not size_gib:
        yield
        return
    try:
        before = HUGE_PAGES.read_text()
        HUGE_PAGES.write_text(str((size_gib * GIB + size_gib * GIB // 32 + GIB) >> 21))
    except OSError as error:
        record.say(f"no huge pages: {error}")
        yield
        return
    try:
        record.say(f"{int(HUGE_PAGES.read_text()) >> 9} GiB of 2 MiB pages for {size_gib} GiB", keep=False)
        yield
    finally:
        HUGE_PAGES.write_text(before)


def warm(size_gib: int) -> None:
    """Touch so much memory once: some machines have it only from then on, and slowly."""

    async def take() -> None:
        pool = Pool(size_gib * GIB)
        await pool.take(Key("warm", "0"), size_gib * GIB - size_gib * GIB // 16)
        pool.close()

    if size_gib:
        anyio.run(take)

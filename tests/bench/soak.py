"""Checks that nothing in the daemon grows without end: `python -m tests.bench.soak [--seconds 3600] [--out FILE]`.

A simulated node with one job that trains. Until the time is over it is moved and suspended again and again, while
connections come and go, and every question is asked. Every ten seconds a line of JSON says how much memory the daemon
has, how many descriptors, and how large its journal is. The memory of the past (100 operations, 1,000 events) fills up
in the first minutes; growth is judged by the second half. The exit status is 1 when something is over its budget.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import psutil

from hegmctl.connection import Connection, connect
from hegmd.migration.journal.file import NAME
from tests.bench.gauges import MIB, Memory, slope
from tests.bench.machine import this_machine
from tests.bench.report import Row, as_text, is_within
from tests.chaos.jobs import BY_HAND, Job
from tests.e2e.daemon import RunningDaemon

SECONDS = 3600.0
SAMPLE_S = 10.0
CLIENTS = 200
GROWTH_KIB_PER_HOUR = 1024.0
JOURNAL_MIB = 1.5
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon at one moment."""

    at_s: float
    resident_bytes: int
    anonymous_bytes: int
    descriptors: int
    journal_bytes: int
    operations: int
    connections: int


class Soak:
    """One daemon, one job, and the operations on them."""

    def __init__(self, daemon: RunningDaemon, job: Job, client: Connection) -> None:
        self._daemon, self._job, self._client = daemon, job, client
        self._began = time.monotonic()
        self._operations = self._connections = 0

    def run(self, seconds: float, out: TextIO) -> list[Sample]:
        """Run until the time is over, and take a sample every ten seconds."""
        samples: list[Sample] = []
        while (at_s := time.monotonic() - self._began) < seconds:
            self._round()
            if at_s >= SAMPLE_S * len(samples):
                self._daemon.read_notices()
                samples.append(self._sample())
                print(json.dumps(asdict(samples[-1])), file=out, flush=True)
        return samples

    def _round(self) -> None:
        pid = self._job.pid
        for gpu in ("gpu1", "gpu0"):
            self._client.migrate([pid], gpu)
        self._client.suspend([pid])
        self._client.resume(pid)
        self._operations += 3
        if self._operations % 30 == 0:
            others = [connect(str(self._daemon.socket_path)) for _ in range(CLIENTS)]
            for other in others:
                other.ping()
                other.close()
            self._connections += CLIENTS
        for ask in (self._client.gpus, self._client.processes, self._client.metrics, self._client.config):
            ask()
        for _ in self._client.events():
            pass
        self._job.make_steps(1)

    def _sample(self) -> Sample:
        pid = self._daemon.process.pid
        memory = Memory.of(pid)
        return Sample(
            at_s=round(time.monotonic() - self._began, 1),
            resident_bytes=memory.resident_bytes,
            anonymous_bytes=memory.anonymous_bytes,
            descriptors=psutil.Process(pid).num_fds(),
            journal_bytes=(self._daemon.folder / "state" / NAME).stat().st_size,
            operations=self._operations,
            connections=self._connections,
        )


def judged(samples: Sequence[Sample]) -> list[Row]:
    """The figures; growth is the slope over the second half, in which nothing has to be filled any more."""
    half = samples[len(samples) // 2 :]
    hours = max(half[-1].at_s - half[0].at_s, 1.0) / 3600
    a_sample = hours / max(len(half) - 1, 1)
    growth = slope([sample.anonymous_bytes / 1024 for sample in half]) / a_sample
    last = samples[-1]
    return [
        Row("how long", last.at_s / 60, "min"),
        Row("operations", last.operations, ""),
        Row("connections", last.connections, ""),
        Row("RSS, first sample", samples[0].resident_bytes / MIB, "MiB"),
        Row("RSS, half way", half[0].resident_bytes / MIB, "MiB"),
        Row("RSS, largest in the second half", max(sample.resident_bytes for sample in half) / MIB, "MiB"),
        Row("RSS, last sample", last.resident_bytes / MIB, "MiB"),
        Row("growth in the second half, an hour", growth, "KiB", GROWTH_KIB_PER_HOUR),
        Row("journal, largest", max(sample.journal_bytes for sample in samples) / MIB, "MiB", JOURNAL_MIB),
        Row("descriptors, half way", half[0].descriptors, ""),
        Row("descriptors, last sample", last.descriptors, "", half[0].descriptors + 2),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it, print the figures, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description="Whether anything grows.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long, an hour unless told")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="a file for the samples, one JSON a line")
    arguments = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory(prefix="hegm-") as folder,
        RunningDaemon(Path(folder), "--simulate", "8x141GiB") as daemon,
        Job(BY_HAND, 1, "gpu0", daemon.socket_path) as job,
        connect(str(daemon.socket_path), timeout_s=WAIT_S) as client,
        arguments.out.open("w") as out,
    ):
        job.make_steps(3)
        samples = Soak(daemon, job, client).run(arguments.seconds, out)
    results = {"soak": judged(samples)}
    print(as_text(this_machine(), results))
    return 0 if is_within(results) else 1


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as in __main__: what is measured is what runs a second time
    sys.exit(main())

"""The rounds of a training in the run over images: into an image and back on another GPU, measured and looked at.

Every round ends with the same questions: is every line that the training ever wrote the one of an undisturbed run, is
it on the GPU that was asked for and on no other. So each figure is one of a job that was whole afterwards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.bench_image import dd_s, memory_of
from tests.gpu.image_jobs import Job
from tests.gpu.image_record import DRIVER, HOST, ImageRate, Record, parts_of
from tests.gpu.moves_jobs import on_stub
from tests.gpu.moves_node import ROOT, Node, WentWrongError

DD_BYTES = 64 << 20 if on_stub() else 1 << 30


@dataclass(frozen=True)
class Place:
    """A folder for images, and what it is on."""

    name: str
    folder: Path

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize


class Rounds:
    """The ways into images and back; each figure goes into the record."""

    def __init__(self, node: Node, record: Record) -> None:
        self.node, self.record = node, record
        self._count = 0
        self._memory = memory_of(random=True, size_bytes=DD_BYTES)

    def close(self) -> None:
        os.close(self._memory)

    def measure_dd(self, place: Place) -> float:
        """Return the rate of one dd with O_DIRECT there."""
        rate = DD_BYTES / dd_s(place.folder, self._memory, DD_BYTES)
        self.record.say(f"  dd on {place.name}: {rate / 1e9:.2f} GB/s")
        return rate

    # -- rounds --------------------------------------------------------------------------------------------------------

    def there_and_back(self, job: Job, place: Place, carrier: str = HOST) -> None:
        """Into an image, ended, and back on the other GPU."""
        with self._image(place) as image:
            source = job.gpu
            self.checkpoint(job, place, image, carrier)
            job.has_ended(self.node.gpus.account())
            self.restore(job, place, image, carrier, self._other(source))

    def left_running(self, job: Job, place: Place, *, back: bool) -> None:
        """Into an image while it continues; with `back` it is ended then, and brought back from the image elsewhere."""
        with self._image(place) as image:
            source = job.gpu
            self.checkpoint(job, place, image, HOST, leave_running=True)
            job.is_whole(source)
            if back:
                job.end()
                self.restore(job, place, image, HOST, self._other(source), "--truncate-outputs")

    def onto_a_taken_gpu(self, job: Job, place: Place) -> None:
        """Restored once another job has its GPU: there it is refused, and elsewhere it continues."""
        with self._image(place) as image:
            source = job.gpu
            self.checkpoint(job, place, image, HOST)
            with _hoarder(source, self.node) as hoard:
                self._require_refused(job, image, hoard)
                self.restore(job, place, image, HOST, self._other(source))

    def _other(self, gpu: int) -> int:
        return (gpu + 1) % len(self.node.gpus)

    def _require_refused(self, job: Job, image: Path, hoard: str) -> None:
        try:
            self.node.hegmctl("restore", str(image))
        except WentWrongError as refused:
            self.record.say(f"  with {hoard} taken: {' '.join(str(refused).split())[:240]}")
        else:
            raise WentWrongError(f"process {job.pid} was restored onto a GPU of which somebody else has {hoard}")
        if job.alive():
            raise WentWrongError(f"the restore was refused, and process {job.pid} lives")

    # -- the two commands ----------------------------------------------------------------------------------------------

    def checkpoint(self, job: Job, place: Place, image: Path, carrier: str, *, leave_running: bool = False) -> None:
        """Raises WentWrongError when it does not end as it should."""
        words = ["--leave-running"] if leave_running else []
        words += ["--carrier", carrier]
        action = "leave-running" if leave_running else "checkpoint"
        before = None if carrier == DRIVER else self.measure_dd(place)
        asked_utc, asked_at = time.time(), time.monotonic()
        answer = self.node.hegmctl("checkpoint", *words, str(job.pid), str(image))
        took_s = time.monotonic() - asked_at
        parts = self._parts(action, answer, asked_utc)
        size_bytes = _stored_bytes(image / "bytes")
        rate = size_bytes / parts["write"] if size_bytes and "write" in parts else None
        parked_s = job.pause_since(asked_utc)[1] if leave_running else None
        # A disk that others use, or that has less left to give, is not taken for slow writing nor for fast.
        dd = None if before is None else max(before, self.measure_dd(place))
        self.record.measure(
            ImageRate(action, job.kind.size_gib, place.name, carrier, took_s, parts, rate, dd, parked_s)
        )

    def restore(self, job: Job, place: Place, image: Path, carrier: str, to: int, *words: str) -> None:
        """The end is the training's first step, as it says itself."""
        asked_utc = time.time()
        answer = self.node.hegmctl("restore", str(image), "--to", f"gpu{to}", *words)
        ended_utc, _ = job.pause_since(asked_utc)
        parts = self._parts("restore", answer, asked_utc)
        self.record.measure(ImageRate("restore", job.kind.size_gib, place.name, carrier, ended_utc - asked_utc, parts))
        job.is_whole(to)

    def _parts(self, action: str, answer: dict[str, Any], since_utc: float) -> dict[str, float]:
        operation = answer["operation"]
        if operation["phase"] != "done":
            raise WentWrongError(f"operation {operation['id']} is {operation['phase']}: {operation.get('failure')}")
        story = self.node.story(operation["id"])
        return parts_of(action, story, self.node.log_since(since_utc, float("inf")), since_utc)

    @contextlib.contextmanager
    def _image(self, place: Place) -> Iterator[Path]:
        """A path for an image, and nothing there afterwards."""
        self._count += 1
        image = place.folder / f"image{self._count}"
        try:
            yield image
        finally:
            shutil.rmtree(image, ignore_errors=True)


def _stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else 0


@contextlib.contextmanager
def _hoarder(gpu: int, node: Node) -> Iterator[str]:
    """Run a process that takes all memory on that GPU; return its output."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.stubs.cuda.program", str(gpu), "1"],
        env={**node.environ(), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready"):
                raise WentWrongError(f"nobody could take GPU {gpu}")
            process.stdin.write("grab\n")
            process.stdin.flush()
            grabbed_bytes = int(process.stdout.readline().split()[1])
            yield f"{grabbed_bytes / (1 << 30):.1f} GiB of gpu{gpu}"
        finally:
            process.kill()

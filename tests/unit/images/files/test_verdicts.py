"""One verdict on an image: `images verify`, `restore --dry-run` and a restore run the same code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hegmd.errors import DENIED, HegmError
from hegmd.gpu_helper.wire import HelperReply, Request
from hegmd.images.files import catalogue
from hegmd.images.files.child import CurrentImage
from hegmd.images.files.images import Images
from hegmd.images.rendezvous import Rendezvous
from hegmd.images.restore_job import JobRestorer
from hegmd.memory.pool import Key, Pool
from hegmd.protocol.images import ImageWorker
from hegmd.system.descriptors import Descriptors
from hegmd.system.programs import Rights
from hegmd.workers.workers import Workers
from tests.unit.images.files.directory import BLOCK_BYTES, CRIU_FILES, MANIFEST, built, flip, ignore
from tests.wide import quick_first

SIZE_BYTES = 6 * BLOCK_BYTES + 17
SELF = Rights(os.geteuid(), os.getegid(), tuple(os.getgroups()))
WORKER = ImageWorker(pid=4711, gpus=(), carrier="worker", size_bytes=SIZE_BYTES, rest_bytes=0, bytes=("4711.0",))
FILES = ["manifest.json", "seal", "bytes/4711.0", *(f"criu/{name}" for name in CRIU_FILES)]


class InProcessUser:
    """A hand that does in this process what the real one does in its own."""

    pid = None

    def __init__(self) -> None:
        self._work = CurrentImage()

    async def call(
        self, op: str, args: Mapping[str, object] | None = None, *, fds: Sequence[int] = (), **_: object
    ) -> HelperReply:
        with Descriptors([os.dup(fd) for fd in fds]) as owned:
            return self._work.requests()[op](Request(args or {}, owned, lambda _: None))

    def kill(self) -> None:
        if self._work.held():
            self._work.folder.close()

    async def ended(self) -> None:
        """It has no process of its own."""


class InProcessUsers:
    async def start(self, _rights: Rights | None) -> InProcessUser:
        return InProcessUser()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _loosen(path: Path) -> None:
    path.chmod(0o660)


def _flip_at(quarter: int, path: Path) -> None:
    flip(path, max(0, path.stat().st_size - 1) * quarter // 4)


HARM: list[Callable[[Path], object]] = [
    *(partial(_flip_at, quarter) for quarter in range(4)),
    *(_cut, _empty, _lengthen, Path.unlink, _link, _pipe, _folder, _loosen),
]


async def _refused(work: Any) -> bool:
    try:
        await work
    except HegmError:
        return True
    return False


async def _verdicts(folder: Path, path: Path) -> tuple[bool, bool, bool]:
    """Whether it is refused by `images verify`, by a dry run, and by a restore as far as that reads the image."""
    hands: Any = InProcessUsers()
    never: Any = None  # none of these is called
    pool = Pool(1 << 30)
    images = Images(folder, in_unit=False, hands=hands)
    by: dict[str, Any] = {"criu": never, "take_snapshot": never, "in_unit": False, "simulated": True, "by_owner": True}
    places = Rendezvous(folder / "hegmd.sock")
    reviving = JobRestorer(lambda: images, places, Workers(), pool, notes=never, **by)

    async def verify() -> None:
        catalogue.verify(str(path), ignore)

    async def rehearse() -> None:
        async with reviving.opened(str(path), SELF) as image:
            await reviving.rehearse(image, SELF, ignore)

    async def restore() -> None:
        async with reviving.opened(str(path), SELF) as image:
            await reviving._examined(image, SELF)
            await reviving._read(image, "4711.0", Key("1", "4711"), WORKER, ignore)

    try:
        return await _refused(verify()), await _refused(rehearse()), await _refused(restore())
    finally:
        pool.close()


@pytest.mark.thorough
@pytest.mark.parametrize("name", quick_first(FILES, 2))
async def test_a_restore_refused_a_damaged_image_that_verify_and_the_dry_run_had_accepted(
    tmp_path: Path, name: str
) -> None:
    """Issue 14, row 15: a dry run passed 7 of 9 damaged images, and `images verify` a flipped bit in a seal."""
    state, is_empty = tmp_path / "state", not CRIU_FILES.get(name.removeprefix("criu/"), b"x")
    state.mkdir()
    for number, harm in enumerate(HARM):
        if is_empty and number < 6:
            continue  # there is nothing to flip or to cut
        path = tmp_path / f"image-{number}"
        built(path, manifest=MANIFEST.replace(workers=(WORKER,)), size_bytes=SIZE_BYTES)
        assert await _verdicts(state, path) == (False, False, False)
        harm(path / name)
        verdicts = await _verdicts(state, path)
        assert len(set(verdicts)) == 1, f"harm {number} to {name}: verify, dry run and restore say {verdicts}"
        is_harmless = name.startswith("bytes/") and harm in (_lengthen, _loosen)  # it is in no chunk
        assert verdicts[0] is not is_harmless, f"harm {number} to {name}"


@pytest.mark.parametrize("harm", [_empty, Path.unlink, _link, _pipe, _folder], ids=lambda harm: harm.__name__)
async def test_only_a_restore_detected_a_bad_lock(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    """Issue 14, row 15. An image with an empty lock is whole, and a missing lock is created again."""
    path = tmp_path / "image"
    built(path, manifest=MANIFEST.replace(workers=(WORKER,)), size_bytes=SIZE_BYTES)
    (path / "lock").touch(mode=0o600)
    harm(path / "lock")
    (tmp_path / "state").mkdir()
    refused = await _verdicts(tmp_path / "state", path)
    assert refused == (harm not in (_empty, Path.unlink),) * 3


async def test_a_foreign_file_in_an_image_is_reported(tmp_path: Path) -> None:
    """Issue 14, row 15: a foreign file does no harm, and `verify` names it."""
    path = tmp_path / "image"
    built(path, manifest=MANIFEST.replace(workers=(WORKER,)), size_bytes=SIZE_BYTES)
    assert catalogue.verify(str(path), ignore).foreign == ()
    (path / "thesis.txt").touch()
    (path / "bytes" / "4712.0").touch()
    (tmp_path / "state").mkdir()
    assert await _verdicts(tmp_path / "state", path) == (False, False, False)
    assert catalogue.verify(str(path), ignore).foreign == ("bytes/4712.0", "thesis.txt")
    hands: Any = InProcessUsers()
    images = Images(tmp_path / "state", in_unit=False, hands=hands)
    image = await images.open(str(path), SELF)
    assert image.foreign == ("bytes/4712.0", "thesis.txt")
    await image.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes root")
def test_a_file_of_another_user_in_an_image_was_found_by_a_restore_alone(tmp_path: Path) -> None:
    """Issue 14, row 15."""
    path = tmp_path / "image"
    built(path)
    os.chown(path / "criu" / "core-4711.img", 65534, 65534)
    with pytest.raises(HegmError, match="belongs to uid 65534") as refused:
        catalogue.verify(str(path), ignore)
    assert refused.value.code is DENIED


def test_a_seal_of_an_earlier_build_has_no_sum_of_its_own_and_is_read(tmp_path: Path) -> None:
    path = tmp_path / "image"
    built(path)
    lines = (path / "seal").read_text().splitlines(keepends=True)
    (path / "seal").write_text("".join(lines[:2]))
    catalogue.verify(str(path), ignore)

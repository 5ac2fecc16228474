"""`hegmctl images`: list, show, check and remove images of jobs, and write the answers as text.

The command needs no daemon: it reads the directory itself, with the caller's rights. The daemon's own code judges
images, and no other module of hegmctl loads it.
"""

from __future__ import annotations

import os
from time import localtime, strftime, time

from hegmctl.arguments import absolute
from hegmctl.output import TextSink, require_yes
from hegmctl.quantities import binary_size, duration
from hegmctl.tables import UNKNOWN, Column, Style, printable, table
from hegmd.errors import ATTENTION, NOT_FOUND, USAGE, HegmError
from hegmd.images.files import catalogue
from hegmd.protocol.images import ImageProgress, ImageRemoved, ImagesSeen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from hegmctl.cli import Session
    from hegmd.protocol.images import ImageSeen, ImageVerified, Manifest


_STATES = {"whole": "green", "in-use": "cyan", "left-over": "yellow", "broken": "red"}
_COLUMNS = (
    Column("STATE"),
    Column("MADE"),
    Column("SIZE", right=True),
    Column("ON DISK", right=True, drop=1),
    Column("NODE", drop=2),
    Column("COMMAND", shrink=12, drop=3),
    Column("PATH"),
)

_TELL_EVERY_BYTES = 256 << 20


def seen_text(answer: ImagesSeen, style: Style) -> list[str]:
    """Return a line for each image, and the problems below."""
    if not answer.images:
        return ["There is no image here."]
    rows = [_row(image, style) for image in answer.images]
    remarks = [_remark(image, image.why) for image in answer.images if image.why]
    left = any(image.state == "left-over" for image in answer.images)
    if left and style.remarks:
        remarks.append("Remove unfinished images with: hegmctl images rm DIR")
    return [*table(_COLUMNS, rows, style), *(["", *remarks] if remarks else [])]


def _row(image: ImageSeen, style: Style) -> list[str | tuple[str, str]]:
    return [
        (image.state, _STATES.get(image.state, "")),
        _time(image.made_utc),
        _size(image.size_bytes),
        _size(image.stored_bytes),
        image.host or UNKNOWN,
        image.command or UNKNOWN,
        image.path,
    ]


def _remark(image: ImageSeen, why: str) -> str:
    return printable(why if image.path in why else f"{image.path}: {why}")


def manifest_text(manifest: Manifest, style: Style) -> list[str]:
    """Return what an operator needs to know before a restore; JSON has all of it."""
    gpus = ", ".join(f"{gpu.id} ({gpu.chip or UNKNOWN})" for gpu in manifest.gpus)
    criu_bytes = sum(file.size_bytes for file in manifest.criu_files)
    driver = f"{manifest.vendor or UNKNOWN} {manifest.driver_version or ''}".rstrip()
    facts = (
        ("made", f"{_time(manifest.made_utc)}, by hegmd {manifest.hegmd_version or UNKNOWN}"),
        ("owner", f"uid {manifest.uid}, gid {manifest.gid}"),
        ("node", f"{manifest.host or UNKNOWN}, Linux {manifest.kernel or UNKNOWN}, {manifest.architecture or UNKNOWN}"),
        ("GPUs", f"{gpus or UNKNOWN}, {driver}" if gpus else UNKNOWN),
        ("CRIU", " ".join((manifest.criu_version or UNKNOWN, *manifest.criu_options))),
        ("the job", "continued after it" if manifest.leave_running else "was ended for it"),
        ("memory", f"{binary_size(criu_bytes)} in {len(manifest.criu_files)} CRIU files"),
        *((f"pid {one.pid}", one.command or UNKNOWN) for one in manifest.processes),
        *((f"bytes {file.name}", _stored(file.size_bytes, file.stored_bytes)) for file in manifest.byte_files),
        ("id", manifest.id),
    )
    columns = max(len(name) for name, _ in facts)
    return [f"{printable(name):<{columns}}  {printable(fact)}" for name, fact in facts]


def progress_text(progress: ImageProgress, style: Style) -> list[str]:
    return [f"read {binary_size(progress.done_bytes)} of {binary_size(progress.size_bytes)}"]


def verified_text(answer: ImageVerified, style: Style) -> list[str]:
    read = f"{binary_size(answer.stored_bytes)} in {duration(answer.took_s)}"
    whole = f"{printable(answer.path)} is complete: every byte matches its checksum ({read})"
    strange = [f"not part of the image: {printable(os.path.join(answer.path, name))}" for name in answer.foreign]
    return [whole, *strange]


def removed_text(answer: ImageRemoved, style: Style) -> list[str]:
    return [f"removed: {printable(path)}" for path in answer.paths]


def _stored(size_bytes: int, stored_bytes: int) -> str:
    zeros = "" if stored_bytes == size_bytes else f", {binary_size(stored_bytes)} of it stored, the rest zeros"
    return f"{binary_size(size_bytes)}{zeros}"


def _size(size_bytes: int | None) -> str:
    return UNKNOWN if size_bytes is None else binary_size(size_bytes)


def _time(time_utc: float | None) -> str:
    return UNKNOWN if time_utc is None else strftime("%Y-%m-%d %H:%M", localtime(time_utc))


def ls(session: Session) -> int:
    """`hegmctl images ls`: status 15 if an image is broken or left over."""
    folders = [absolute(folder) for folder in session.arguments.texts("DIR") or (".",)]
    images = tuple(image for folder in folders for image in catalogue.look_into(folder))
    session.sink.answer(ImagesSeen(images=images), seen_text)
    return ATTENTION.exit_status if any(seen.state in ("broken", "left-over") for seen in images) else 0


def from_newest(folder: str) -> list[str]:
    """Return the paths of the complete images in that directory, the newest first. Raises NOT_FOUND."""
    images = catalogue.look_into(folder)
    whole = [image for image in images if image.state == "whole" and image.made_utc is not None]
    if not whole:
        why = f"{len(images)} images, none of them complete" if images else "no image"
        raise HegmError(NOT_FOUND, f"there is {why} in {folder}", f"run: hegmctl images ls {folder}", {"path": folder})
    return [image.path for image in reversed(catalogue.from_oldest(whole, time()))]


def show(session: Session) -> int:
    session.sink.answer(catalogue.read(absolute(session.arguments.required("DIR"))), manifest_text)
    return 0


def verify(session: Session) -> int:
    path = absolute(session.arguments.required("DIR"))
    try:
        verified = catalogue.verify(path, _teller(session))
    finally:
        session.sink.end_progress()
    session.sink.answer(verified, verified_text)
    return 0


def rm(session: Session) -> int:
    paths = [absolute(folder) for folder in session.arguments.texts("DIR")]
    if not paths:
        raise HegmError(USAGE, "images rm needs at least one DIR", "run: hegmctl images ls")
    for path in paths:
        catalogue.require_removable(path)
    if not session.arguments.flag("yes"):
        named = ", ".join(paths)
        lost = f"Remove {named}? A job that ended for this image cannot continue without it"
        require_yes(lost, named, "run: hegmctl images show DIR")
    for path in paths:
        catalogue.remove(path)
    session.sink.answer(ImageRemoved(paths=tuple(paths)), removed_text)
    return 0


def _teller(session: Session) -> Callable[[int, int], object]:
    """Return a function that shows progress to people; JSON is one document."""
    told_bytes = 0

    def tell(done_bytes: int, size_bytes: int) -> None:
        nonlocal told_bytes
        if done_bytes - told_bytes >= _TELL_EVERY_BYTES and isinstance(session.sink, TextSink):
            told_bytes = done_bytes
            session.sink.progress(ImageProgress(done_bytes=done_bytes, size_bytes=size_bytes), progress_text)

    return tell

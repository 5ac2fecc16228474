"""Images of jobs on disk: `hegmctl images`, with the rights of whoever asks and without a daemon.

A directory of one's own takes no daemon to look at, and one that lies where no hegmd runs is looked at all the same.
What an image is and when it is whole is hegmd's own code, which is loaded here and nowhere else in hegmctl.
"""

from __future__ import annotations

import os

from hegmctl.images_text import manifest_text, progress_text, removed_text, seen_text, verified_text
from hegmctl.output import TextSink, require_yes
from hegmd.errors import ATTENTION, NOT_FOUND, USAGE, HegmError
from hegmd.images.files import catalogue
from hegmd.protocol.images import ImageProgress, ImageRemoved, ImagesSeen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from hegmctl.cli import Session

_TELL_EVERY_BYTES = 256 << 20


def ls(session: Session) -> int:
    """`hegmctl images ls`: 15 when one of them is not good."""
    folders = [os.path.abspath(folder) for folder in session.arguments.texts("DIR") or (".",)]
    images = tuple(seen for folder in folders for seen in catalogue.look_into(folder))
    session.sink.answer(ImagesSeen(images=images), seen_text)
    return ATTENTION.exit_status if any(seen.state in ("broken", "left-over") for seen in images) else 0


def newest_of(folder: str) -> str:
    """The path of the newest whole image in that directory. Raises NOT_FOUND."""
    images = catalogue.look_into(folder)
    whole = [seen for seen in images if seen.state == "whole" and seen.made_utc is not None]
    if not whole:
        why = f"{len(images)} images, none of them whole" if images else "no image"
        raise HegmError(NOT_FOUND, f"there is {why} in {folder}", f"run: hegmctl images ls {folder}", {"path": folder})
    return max(whole, key=lambda seen: (seen.made_utc or 0.0, seen.path)).path


def show(session: Session) -> int:
    """`hegmctl images show`."""
    session.sink.answer(catalogue.read(os.path.abspath(session.arguments.required("DIR"))), manifest_text)
    return 0


def verify(session: Session) -> int:
    """`hegmctl images verify`."""
    path = os.path.abspath(session.arguments.required("DIR"))
    try:
        verified = catalogue.verify(path, _teller(session))
    finally:
        session.sink.end_progress()
    session.sink.answer(verified, verified_text)
    return 0


def rm(session: Session) -> int:
    """`hegmctl images rm`."""
    paths = [os.path.abspath(folder) for folder in session.arguments.texts("DIR")]
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
    """Shows how far it is, to people; JSON is one document."""
    told_bytes = 0

    def tell(done_bytes: int, size_bytes: int) -> None:
        nonlocal told_bytes
        if done_bytes - told_bytes >= _TELL_EVERY_BYTES and isinstance(session.sink, TextSink):
            told_bytes = done_bytes
            session.sink.progress(ImageProgress(done_bytes=done_bytes, size_bytes=size_bytes), progress_text)

    return tell

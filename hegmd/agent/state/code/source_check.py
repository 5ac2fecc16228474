"""Check whether a Python started with the same arguments could read the script again.

Checked before a training exits. A script from a pipe was read once: the next Python would read nothing, end with 0, and
look as if the training had finished.
"""

from __future__ import annotations

import os
import sys

from ..values.refusals import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_BY_INPUT = ("<stdin>", "<python-input")
_HINT = "start it from a file: hegmctl run --allow-restart -- python3 FILE"


def refusals() -> Iterator[Refusal]:
    """Yield why the script could not be started again."""
    frame = _first_frame()
    if frame is not None and frame.f_code.co_filename.startswith(_BY_INPUT):
        yield Refusal("the script came from standard input, which cannot be read again", _HINT)
        return
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    # With a spec it is a module (`-m`) or an archive. A relative path says too little about how it was started.
    if getattr(main, "__spec__", None) is not None or not isinstance(path, str) or not os.path.isabs(path):
        return
    try:
        os.stat(path)
    except OSError as error:
        yield Refusal(f"the script {path} cannot be read again: {error.strerror}", "put it back where it was")
    else:
        if not os.path.isfile(path):
            yield Refusal(f"the script came from {path}, which cannot be read again", _HINT)


def _first_frame() -> FrameType | None:
    """Return the main thread's first frame."""
    threading = sys.modules.get("threading")
    if threading is None:
        return None
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented all the same
    frame = frames.get(threading.main_thread().ident)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame

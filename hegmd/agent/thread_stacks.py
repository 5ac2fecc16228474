"""The stacks of this process's threads as text, for a training that makes no progress.

Runs in the agent's own thread, so that it works while the training thread waits in the kernel or in C code. A C call
that keeps the interpreter lock prevents this answer too.
"""

from __future__ import annotations

import sys

from .trap import NoCollection, is_ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

_MAX_THREADS = 64
_MAX_FRAMES = 40


def thread_stacks(training: int) -> tuple[str, ...]:
    """Return a text for each thread but the agent's, the innermost call last; `training` is the thread that trains."""
    names = getattr(sys.modules.get("threading"), "_active", {})
    with NoCollection():
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - it is documented
        own = [(ident, _lines(frame)) for ident, frame in frames.items() if not is_ours(frame)]
        frames.clear()  # this function's frame is among them, and would keep itself and all variables of every thread
    own.sort(key=lambda found: found[0] != training)
    found: list[str] = []
    for ident, lines in own[:_MAX_THREADS]:
        name = getattr(names.get(ident), "name", f"thread {ident}")
        what = ", which trains" if ident == training else ""
        found.append("\n".join([f"{name}{what}", *lines]))
    return tuple(found)


def _lines(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < _MAX_FRAMES:
        code = frame.f_code
        lines.append(f"  {code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    lines.reverse()
    return lines

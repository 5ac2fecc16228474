"""Metrics as a file, for node_exporter's textfile collector.

Owns the file: it appears as a whole, and is removed when the daemon ends or writes elsewhere, because stale figures
would be taken for current ones. A thread writes it, since the disk may hang. While it hangs, nothing more is written,
and that is logged once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.abc

from hegmd.errors import HegmError
from hegmd.system.threads import run_detached

# The service's sandbox makes most of the file system read-only.
_SANDBOX_HINT = "; open its directory to the service with ReadWritePaths= (systemctl edit hegmd)"

logger = logging.getLogger(__name__)

WRITE_DEADLINE_S = 10.0
REMOVE_DEADLINE_S = 2.0
LINGER_S = 1.0
_MODE = 0o644  # node_exporter runs as a user of its own


class Textfile:
    """Writes the result of `render` to one file periodically; to none while the path is None."""

    def __init__(
        self,
        path: Path | None,
        interval_s: float,
        render: Callable[[], Awaitable[str]],
        *,
        write: Callable[[Path, str], None] | None = None,
        write_deadline_s: float = WRITE_DEADLINE_S,
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._render = render
        self._put = write or write_whole
        self._write_deadline_s = write_deadline_s
        self._changed = anyio.Event()
        self._written: Path | None = None
        self._under_way: set[object] = set()
        self._failing = False
        #: Number of failed writes since the start.
        self.failures = 0

    def configure(self, path: Path | None, interval_s: float) -> None:
        """Use these settings; writes at once if they differ."""
        if (path, interval_s) != (self._path, self._interval_s):
            self._path, self._interval_s = path, interval_s
            self._changed.set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled; then remove the file."""
        task_status.started()
        try:
            while True:
                self._changed = anyio.Event()
                await self._turn()
                with anyio.move_on_after(None if self._path is None else self._interval_s):
                    await self._changed.wait()
        finally:
            with anyio.move_on_after(REMOVE_DEADLINE_S, shield=True):
                await self._take_away()

    async def _turn(self) -> None:
        path = self._path
        if self._written not in (None, path):
            await self._take_away()
        if path is None:
            return
        try:
            text = await self._render()
            await self._write(path, text)
        except (HegmError, OSError) as error:
            self._failed(path, error)
        else:
            if self._failing:
                logger.info("metrics are written to %s again", path)
            self._failing = False

    async def _write(self, path: Path, text: str) -> None:
        if self._under_way:
            raise OSError("the disk does not answer")
        token = object()
        self._under_way.add(token)

        def work(_: object) -> None:
            try:
                self._put(path, text)
            finally:
                self._under_way.discard(token)

        self._written = path
        with anyio.move_on_after(self._write_deadline_s) as limit:
            # Wait for a running write, so that its file is removed.
            try:
                await run_detached(work, name="hegmd-textfile", linger_s=LINGER_S)
            except HegmError:  # no thread could be started, so the loop does not wait
                self._under_way.discard(token)
                raise
        if limit.cancelled_caught:
            raise OSError(f"not written after {self._write_deadline_s:g} s")

    async def _take_away(self) -> None:
        path, self._written = self._written, None
        if path is not None and not self._under_way:
            with contextlib.suppress(OSError, HegmError):
                await run_detached(lambda _: path.unlink(missing_ok=True), name="hegmd-textfile")

    def _failed(self, path: Path, error: Exception) -> None:
        self.failures += 1
        if not self._failing:
            reason = error.strerror or error if isinstance(error, OSError) else error
            barred = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES)
            logger.error("metrics cannot be written to %s: %s%s", path, reason, _SANDBOX_HINT if barred else "")
        self._failing = True


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one step, readable for all users. Raises OSError and leaves nothing behind."""
    # The collector reads *.prom only and ignores this name.
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, _MODE)
            file.write(text.encode())
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise

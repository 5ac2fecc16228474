"""Waits for the ends of processes that are not children of the daemon, through pidfds."""

from __future__ import annotations

import os
from collections.abc import Callable

import anyio

from hegmd.errors import HegmError
from hegmd.system.resource_errors import scarcity

_POLL_INTERVAL_S = 1.0


async def ended(pid: int, is_alive: Callable[[], bool]) -> None:
    """Wait for the end of a process.

    If the kernel never grants a pidfd, `is_alive` is polled: it checks the start time, or raises HegmError if that
    is unknown now.
    """
    while True:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError as error:
            # /proc cannot be read without a scarce resource either, and a shortage may pass.
            if scarcity(error) is None and _is_gone(is_alive):
                return
            await anyio.sleep(_POLL_INTERVAL_S)
            continue
        try:
            if is_alive():
                await anyio.wait_readable(pidfd)
            return
        except HegmError:
            pass
        finally:
            anyio.notify_closing(pidfd)
            os.close(pidfd)
        await anyio.sleep(_POLL_INTERVAL_S)


async def until_ended(pidfd: int) -> None:
    """Wait until that process has ended, and close its pidfd, also when cancelled."""
    try:
        await anyio.wait_readable(pidfd)
    finally:
        anyio.notify_closing(pidfd)
        os.close(pidfd)


def _is_gone(is_alive: Callable[[], bool]) -> bool:
    try:
        return not is_alive()
    except HegmError:
        return False

"""All protected jobs of a node: what goes wrong for one of them ends neither its protection nor the daemon."""

from __future__ import annotations

import logging
from typing import cast

import pytest

from hegmd.recovery.protection import Protection
from hegmd.recovery.service import run_once


class Failing:
    """A protection that fails, as where the disk is full."""

    job = "job j1"

    async def run(self) -> None:
        raise OSError(28, "No space left on device")


async def test_a_protection_that_fails_does_not_end_the_daemon(caplog: pytest.LogCaptureFixture) -> None:
    """Its error ends nothing but that run of it, and is in the log."""
    with caplog.at_level(logging.ERROR):
        await run_once(cast("Protection", Failing()), pause_s=0.0)
    assert "failed, and begins anew" in caplog.text
    assert "No space left" in caplog.text

"""The launcher of ranks: what it asks the daemon."""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hegmctl.ranks import SILENT_S, Launcher
from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.protocol.messages import RankStart

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_rank_was_started_in_a_suspended_job_while_the_daemon_was_restarted() -> None:
    """The connection was refused for a moment. Without a daemon that has ever answered, ranks start at once."""
    refused = HegmError(UNAVAILABLE, "it does not accept a connection", "see its log")
    answers: list[RankStart | HegmError] = []

    @contextmanager
    def connect(_limit_s: float | None) -> Iterator[Any]:
        if isinstance(answer := answers.pop(0), HegmError):
            raise answer
        yield SimpleNamespace(call=lambda *_: answer)

    launcher = Launcher(1, ["true"], {"HEGM_RUN": "run-1"}, connect=cast("Any", connect), say=lambda _text: None)
    try:
        answers += [refused, RankStart(may_start=False), refused, RankStart(may_start=False), refused, refused, refused]
        assert [launcher._may_start() for _ in range(5)] == [True, False, False, False, False]
        assert launcher._silent_since is not None
        launcher._silent_since -= SILENT_S
        assert [launcher._may_start() for _ in range(2)] == [True, True]  # it does not come back
    finally:
        launcher._close()
        os.close(launcher._board_fd)

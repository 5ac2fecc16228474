"""Two jobs change places on a stub node, by the places that the driver has them at."""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmd.protocol.messages import Drained, Swap
from tests.e2e.driven import DrivenNode, Watched

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]


def test_jobs_that_a_new_daemon_has_moved_are_not_looked_for_where_an_older_one_left_them(tmp_path: Path) -> None:
    with DrivenNode(tmp_path) as node, node.agented(0) as one, node.agented(1) as other:
        first, second = Watched(one), Watched(other)
        with node.connect() as connection:
            connection.migrate(first.pid, "gpu1")
        node.daemon.stop()
        node.daemon.start()
        node.wait_for_agents(first.pid, second.pid)
        with node.connect() as connection:
            connection.migrate(first.pid, "gpu0")
            swapped = connection.call(Swap(first=first.pid, second=second.pid), Drained)
        assert [operation.phase for operation in swapped.operations] == ["done", "done"]
        assert (list(node.vram(first.pid)), list(node.vram(second.pid))) == (["gpu1"], ["gpu0"])
        first.is_whole()
        second.is_whole()

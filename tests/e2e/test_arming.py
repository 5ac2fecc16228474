"""Reservations made before a job is touched are released if one of them fails: a daemon over the stub driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hegmd.protocol.messages import Migrate, OperationReply
from tests.e2e.driven import DrivenNode, Watched, at_rest, helper_of, only_its_own

pytestmark = [pytest.mark.e2e]


@pytest.mark.parametrize("piece", [1, 2, 3])
def test_a_helper_killed_between_two_reservations_leaves_none_of_them(tmp_path: Path, piece: int) -> None:
    """Room for the driver, room for the storages, and the peer's buffers: three pieces on the target."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with DrivenNode(tmp_path) as node, node.agented(0) as program:
        watched = Watched(program)
        node.cuda.order(f"hold cuMemCreate {gate} {piece}")
        with node.connect() as connection:
            connection.call(Migrate(pids=(watched.pid,), to="gpu1", carrier="peer", wait=False), OperationReply)
        with gate.open("w"):
            helper_of(node).kill()
            node.cuda.mend()
        assert at_rest(node).phase in {"done", "rolled-back"}
        watched.is_whole()
        only_its_own(node, watched)

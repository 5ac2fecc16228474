"""The groups of a block over ranks: how they end, and what is kept of them once the block has ended."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from hegmd.agent.ranks.groups import Groups
from tests.needs import need_torch
from tests.patience import HANG_S

torch: Any = need_torch()

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.leaks_allowed("gloo has a thread and its descriptors until the process ends"),
    pytest.mark.xdist_group("torch"),
]


def test_models_of_a_block_that_has_ended_are_not_kept(tmp_path: Path) -> None:
    groups = Groups(str(tmp_path))
    groups.connect("gloo", 0, 0, 1, {})
    try:
        wrapped = groups.wrap(torch.nn.Linear(1, 1), is_first_step=True, options={})
        known = weakref.ref(wrapped)
        groups.forget()
        del wrapped
        gc.collect()
        assert known() is None
    finally:
        groups.leave()


class ProcessGroupNCCL:
    """A backend whose abort lasts until it is let go."""

    def __init__(self) -> None:
        self.aborting, self.let_go = threading.Event(), threading.Event()
        self.aborts = 0
        self.is_destroyed_meanwhile = False

    def abort(self) -> None:
        self.aborts += 1
        self.aborting.set()
        assert self.let_go.wait(HANG_S)
        self.is_destroyed_meanwhile = not torch.distributed.is_initialized()


class Group:
    """A ProcessGroup with that backend."""

    _device_types = ("cuda",)

    def __init__(self, backend: ProcessGroupNCCL) -> None:
        self._backend = backend

    def _get_backend(self, _device: str) -> ProcessGroupNCCL:
        return self._backend


def test_a_communicator_is_aborted_once_and_not_destroyed_meanwhile(tmp_path: Path) -> None:
    """Rank 1 fails: its listening thread ends the waits while its block leaves the groups."""
    groups, backend = Groups(str(tmp_path)), ProcessGroupNCCL()
    groups.connect("gloo", 0, 0, 1, {})
    known: Any = torch.distributed.distributed_c10d._world.pg_map
    known[Group(backend)] = ("nccl", None)
    ending, leaving = (threading.Thread(target=call) for call in (groups.end_waits, groups.leave))
    try:
        ending.start()
        assert backend.aborting.wait(HANG_S)
        leaving.start()
    finally:
        backend.let_go.set()
        ending.join(HANG_S)
        leaving.join(HANG_S)
    assert backend.aborts == 1
    assert not backend.is_destroyed_meanwhile
    assert not torch.distributed.is_initialized()

"""The groups of a block over ranks: how they end, and what is kept of them once the block has ended."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from hegmd.agent.ranks.groups import Groups
from tests.looks import pause
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


def test_a_communicator_is_aborted_once_and_not_destroyed_during_the_abort(tmp_path: Path) -> None:
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


# The key that this rank sets before it waits for the other: `Groups` the first one, gloo the second.
OUR_KEY, GLOO_KEY = b"hegm-1-0", b"//cpu//"


class Interrupted(BaseException):
    """The handler of the signal raises it."""


def _raise(*_: object) -> None:
    raise Interrupted


def test_a_wait_for_a_rank_that_never_connects_can_be_interrupted(tmp_path: Path) -> None:
    """PyTorch's store waited for minutes, and no signal ended that: the rank that lived was killed for it."""
    groups = Groups(str(tmp_path))
    before = signal.signal(signal.SIGUSR1, _raise)
    store = tmp_path / "generation-1"

    def interrupt() -> None:
        while not store.exists() or not any(key in store.read_bytes() for key in (OUR_KEY, GLOO_KEY)):
            pause()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(Interrupted):
            groups.connect("gloo", 1, 0, 2, {})
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert not torch.distributed.is_initialized()


def test_the_timeout_of_a_group_ends_the_wait_for_a_rank_that_never_comes_to_connect(tmp_path: Path) -> None:
    """It had no end: before the first step a rank has no limit of its own."""
    groups = Groups(str(tmp_path))
    with pytest.raises(TimeoutError, match=r"rank 1, 2 did not come to connect within 0\.05 s"):
        groups.connect("gloo", 1, 0, 3, {"timeout": timedelta(seconds=0.05)})
    assert not torch.distributed.is_initialized()


def test_the_timeout_of_a_further_group_ends_the_wait_for_a_rank_that_never_comes(tmp_path: Path) -> None:
    groups = Groups(str(tmp_path))
    groups.connect("gloo", 0, 0, 1, {})
    try:
        groups._ranks = 2  # the other one has connected, and has ended since
        with pytest.raises(TimeoutError, match="rank 1 did not come"):
            groups.new_group([0, 1], timedelta(seconds=0.05))
        with pytest.raises(TimeoutError, match="rank 1 did not come"):
            groups.new_group([0, 1], timeout=timedelta(seconds=0.05))
    finally:
        groups.leave()

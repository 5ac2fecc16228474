"""Detects a rank that failed during its start: by the process tree, and by its launcher's behaviour."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from typing_extensions import Self

from hegmd.migration.methods.rank_startup import LEFT_BEHIND_S, RankPosition, StartingRank, position_of, ranks_below
from hegmd.node.processes.procfs import ProcessKey, start_ticks_of
from tests.patience import HANG_S

COMMAND, RANK, OTHER = (10, 1), (11, 1), (12, 1)
AGAIN = RankPosition((21, 1), (20, 1))


class Started:
    """A rank of which those live that are named."""

    def __init__(self, *living: ProcessKey) -> None:
        self.living = set(living)
        self.rank = StartingRank(self.living.__contains__)
        self.rank.note(RANK, RankPosition(RANK, COMMAND))

    def failed(self, now: float) -> bool:
        return self.rank.fallen(now) is not None and self.rank.is_left_behind(now)


def test_a_rank_that_lives_has_not_fallen() -> None:
    started = Started(RANK, COMMAND)
    started.rank.note(OTHER, RankPosition(OTHER, COMMAND))
    assert not started.failed(0.0)
    assert not started.failed(LEFT_BEHIND_S)


def test_a_rank_that_its_launcher_restarts_has_failed() -> None:
    """torchrun did, and the operation waited for ranks that waited for one another."""
    started = Started(COMMAND, OTHER)
    assert not started.failed(0.0)
    started.rank.note(OTHER, RankPosition(OTHER, COMMAND))
    assert started.failed(0.0)


def test_a_rank_that_is_not_replaced_in_time_counts_as_failed() -> None:
    started = Started(COMMAND)
    assert not started.failed(100.0)
    assert not started.failed(100.0 + LEFT_BEHIND_S / 2)
    assert started.failed(100.0 + LEFT_BEHIND_S)


def test_the_exit_of_a_launcher_is_left_to_its_supervisor() -> None:
    """The daemon would have started ranks again that had finished their training before it saw them."""
    started = Started(COMMAND)
    assert not started.failed(0.0)
    started.living.clear()
    assert not started.failed(LEFT_BEHIND_S)


def test_a_restarted_command_has_not_failed_by_an_earlier_failure() -> None:
    started = Started(COMMAND)
    assert not started.failed(0.0)
    started.living.update((AGAIN.rank, AGAIN.command))
    started.rank.note(AGAIN.rank, AGAIN)
    assert not started.failed(LEFT_BEHIND_S)
    started.living.remove(AGAIN.rank)
    assert not started.failed(LEFT_BEHIND_S + 1)


def test_a_child_of_a_rank_does_not_count_as_the_rank() -> None:
    """A script that prepares its data says that it is that rank as well, and ends before the training begins."""
    started = Started(COMMAND, RANK)
    started.rank.note(OTHER, RankPosition(RANK, COMMAND))
    assert not started.failed(LEFT_BEHIND_S)
    assert started.rank.knows(OTHER)


# -- by the tree of processes ------------------------------------------------------------------------------------------


class Tree:
    """Shells below this process, each of which tells its pid, until their input ends."""

    def __init__(self, script: str) -> None:
        self._process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate(timeout=HANG_S)

    @property
    def command(self) -> ProcessKey:
        return _who(self._process.pid)

    def next_key(self) -> ProcessKey:
        """Return the pid that was reported next."""
        assert self._process.stdout is not None
        return _who(int(self._process.stdout.readline()))


def _who(pid: int) -> ProcessKey:
    ticks = start_ticks_of(pid)
    assert ticks is not None
    return pid, ticks


@pytest.fixture
def wrapped() -> Iterator[Tree]:
    """A launcher that is reported to be of a world of its own, a shell around its rank, and that."""
    rank = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 sh -c 'echo $$; sh -c \"echo \\$\\$; read _\"; true'"
    with Tree(f"export RANK=0 WORLD_SIZE=1; {rank}; true") as tree:
        yield tree


def test_a_rank_is_the_topmost_process_with_its_variables(wrapped: Tree) -> None:
    shell, rank = wrapped.next_key(), wrapped.next_key()
    assert position_of(rank[0], os.getpid()) == RankPosition(shell, wrapped.command)


def test_a_process_below_another_supervisor_is_not_a_rank_of_this_one(wrapped: Tree) -> None:
    wrapped.next_key()
    rank = wrapped.next_key()
    assert position_of(rank[0], rank[0]) is None
    assert position_of(os.getpid(), wrapped.command[0]) is None


def test_a_rank_that_fell_before_the_daemon_was_started_was_waited_for_in_vain() -> None:
    """The daemon did not know the rank of the exited process; the other ranks run and wait for it."""
    rank = StartingRank({COMMAND, OTHER}.__contains__)
    rank.note_below(COMMAND, {}, 1)
    assert rank.fallen(0.0) is None, "its launcher may have started none yet"
    rank.note_below(COMMAND, {0: OTHER}, 1)
    assert rank.fallen(5.0) is not None
    assert not rank.is_left_behind(5.0)
    rank.note_below(COMMAND, {0: OTHER}, 1)
    assert rank.is_left_behind(5.0 + LEFT_BEHIND_S)


def test_a_rank_that_its_launcher_starts_after_the_others_has_not_fallen() -> None:
    rank = StartingRank({COMMAND, RANK, OTHER}.__contains__)
    rank.note_below(COMMAND, {0: OTHER}, 1)
    assert rank.fallen(0.0) is not None
    rank.note_below(COMMAND, {0: OTHER, 1: RANK}, 1)
    assert rank.fallen(LEFT_BEHIND_S) is None
    assert not rank.is_left_behind(LEFT_BEHIND_S)


def test_ranks_are_found_below_their_launcher_without_their_children() -> None:
    launcher = "for n in 0 1; do RANK=$n sh -c 'sleep 60 & echo $$; wait' & done; wait"
    with subprocess.Popen(["sh", "-c", launcher], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            output = {int(process.stdout.readline()) for _ in range(2)}
            command, ranks = ranks_below(process.pid)
            assert command == (process.pid, start_ticks_of(process.pid))
            assert {pid for pid, _ in ranks.values()} == output
            assert set(ranks) == {0, 1}
        finally:
            os.killpg(process.pid, signal.SIGKILL)

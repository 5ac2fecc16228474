"""States of ranks, which the supervisor of the job passes to its own ranks only."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import Self

from hegmctl.rank_states import STATES, RankStates
from hegmd.agent.state.storage import state_file
from tests.patience import HANG_S

POLL_S = 0.01
ROOT = Path(__file__).parents[2]
ASKS = """
import os
from hegmd.agent.state.values import inherited as given
try:
    given.claim()
except OSError as error:
    print(f"refused: {error}")
else:
    print(given.is_there(), given.is_for_ranks(), given.state(), os.environ.get(given.RANKS, "-"), flush=True)
if input() == "train on":
    given.note_past()
    print("noted", flush=True)
    input()
"""


@pytest.fixture
def lock(tmp_path: Path) -> int:
    """The right to continue from the states, as the daemon makes it."""
    made = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(made, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made


@pytest.fixture
def states(tmp_path: Path, lock: int) -> Iterator[RankStates]:
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # which a supervisor waits for
    held: dict[int, int] = {}
    for rank in (0, 1):
        held[rank] = os.open(tmp_path / f"state.{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        state_file.write(held[rank], {"rank": rank})
    made = RankStates(held, lock)
    try:
        yield made
    finally:
        made.close()
        signal.signal(signal.SIGIO, before)


class Rank:
    """A process that asks for its state, until it is left."""

    def __init__(self, address: str, rank: str | None, world: str = "2") -> None:
        environ = {"PYTHONPATH": str(ROOT), STATES: address, "WORLD_SIZE": world}
        environ.update({} if rank is None else {"RANK": rank})
        self._process = subprocess.Popen(
            [sys.executable, "-c", ASKS], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def result(self, states: RankStates | None) -> str:
        """Return the result, served from these states; they stay."""
        assert self._process.stdout is not None
        while not select.select([self._process.stdout], [], [], POLL_S)[0]:
            if states is not None:
                states.serve()
        return self._process.stdout.readline().strip()

    def train_on(self) -> None:
        """Have it note that it did."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("train on\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "noted\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate("\n", timeout=HANG_S)


def _is_free(path: Path) -> bool:
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(own)


@pytest.mark.thorough
def test_each_rank_has_its_own_state_and_may_continue_from_it(states: RankStates, tmp_path: Path) -> None:
    """The right lasts as long as any of the ranks, also after the end of the supervisor that had it."""
    with Rank(states.address, "1") as one:
        assert one.result(states) == "True False {'rank': 1} -"
        with Rank(states.address, "0") as other:
            assert other.result(states) == "True False {'rank': 0} -"
        states.close()
        assert not _is_free(tmp_path / "lock")
    assert _is_free(tmp_path / "lock")


def test_the_launcher_itself_takes_none(states: RankStates) -> None:
    """The launcher may import PyTorch, but must neither continue from another process's state nor make a step."""
    with Rank(states.address, None) as launcher:
        assert launcher.result(states) == f"False True None {states.address}"


def test_a_world_of_another_size_is_refused(states: RankStates) -> None:
    with Rank(states.address, "0", world="3") as rank:
        assert rank.result(states) == "refused: it is of 2 ranks, and the job has 3 now"


def test_a_rank_whose_supervisor_has_ended_does_not_start_over(states: RankStates) -> None:
    address = states.address
    states.close()
    with Rank(address, "1") as rank:
        assert "rank 1 cannot reach the hegmctl run of its job" in rank.result(None)


def test_ranks_restarted_after_the_operation_begin_normally(states: RankStates) -> None:
    """torchrun restarts a failed rank itself. The rank was ended each time, for lack of a state that never existed."""
    states.end()
    with Rank(states.address, "1") as rank:
        assert rank.result(states) == "False False None -"


@pytest.mark.thorough
def test_ranks_that_a_launcher_restarts_hours_later_do_not_continue_from_old_states(
    states: RankStates, lock: int
) -> None:
    """No daemon had run since the end of the operation."""
    with Rank(states.address, "0") as one, Rank(states.address, "1") as other:
        for rank in (one, other):
            assert rank.result(states).startswith("True")
            assert not states.are_past
            rank.train_on()
        assert states.are_past
    with Rank(states.address, "1") as again:
        assert again.result(states) == "False False None -"

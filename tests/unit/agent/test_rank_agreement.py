"""Ranks agree once all have read the same, whatever an earlier agreement has left in their store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import monotonic

import pytest

from hegmd.agent.rank_agreement import Agreement, DisagreementError, Ranks
from tests.patience import HANG_S


class Store:
    """The interface of PyTorch's stores, in one process."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self._lock = Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.kept[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self.kept for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._lock:
            return [self.kept[key] for key in keys]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]


def agree(store: Store, ranks: range, size: int, limit_s: float = HANG_S) -> list[Agreement]:
    """Return the result of each of these ranks."""

    def one(rank: int) -> Agreement:
        deadline = monotonic() + limit_s
        return Ranks(store, rank, size).agree("step", {"rank": rank}, deadline, lambda: False)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in ranks]]


def test_each_rank_reads_the_statements_of_all_in_the_order_of_ranks() -> None:
    agreed = agree(Store(), range(3), 3)
    assert [[stated["rank"] for stated in one.statements] for one in agreed] == [[0, 1, 2]] * 3
    assert len({one.label for one in agreed}) == 1


def test_no_two_agreements_have_the_same_label_or_more_keys() -> None:
    store = Store()
    first = agree(store, range(2), 2)
    keys = set(store.kept)
    assert agree(store, range(2), 2)[0].label != first[0].label
    assert set(store.kept) == keys


def test_a_rank_of_the_previous_generation_does_not_count_as_present() -> None:
    store = Store()
    agree(store, range(2), 2)
    with pytest.raises(DisagreementError, match="rank 1 of 2 did not respond in time") as raised:
        agree(store, range(1), 2, limit_s=0.0)
    assert not raised.value.is_known


def test_a_rank_that_sees_nothing_of_another_knows_that_nothing_was_agreed() -> None:
    with pytest.raises(DisagreementError, match="2 ranks \\(1, 2\\) of 3") as raised:
        agree(Store(), range(1), 3, limit_s=0.0)
    assert raised.value.is_known


def test_an_agreement_that_failed_can_be_had_again() -> None:
    store = Store()
    with pytest.raises(DisagreementError):
        agree(store, range(1), 2, limit_s=0.0)
    assert len(agree(store, range(2), 2)) == 2


def test_an_unreachable_descriptor_store_is_reported() -> None:
    class Gone(Store):
        def check(self, keys: list[str]) -> bool:
            raise ConnectionError("the launcher is gone")

    with pytest.raises(DisagreementError, match="the launcher is gone"):
        agree(Gone(), range(1), 2)


class EndedStore(Store):
    """The process that served it has ended."""

    def set(self, key: str, value: str) -> None:
        raise ConnectionError("Broken pipe")


def test_ranks_whose_launcher_has_ended_are_not_told_to_retry() -> None:
    """`hegmctl resume` named itself as the next step, and could never succeed."""
    with pytest.raises(DisagreementError) as failed:
        Ranks(EndedStore(), 0, 2).agree("reconnect", {}, monotonic() + HANG_S, lambda: False)
    assert "launcher" in failed.value.hint
    assert "start the job again" in failed.value.hint

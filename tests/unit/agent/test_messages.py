"""The ranks of a group that others wait for: by the messages and collectives that each has started."""

from __future__ import annotations

from typing import Any

from hegmd.agent import messages
from hegmd.agent.messages import ANY, Position, awaited_messages, behind
from tests.cells import in_one_test

Case = tuple[int, dict[int, int], dict[int, int]]


@in_one_test(
    ("ranks", "expected"),
    [
        # Three stages of a pipeline, two parts forward and back: the middle one has twice as many messages.
        ([(5, {1: 2}, {1: 2}), (5, {0: 2, 2: 2}, {0: 2, 2: 2}), (5, {1: 2}, {1: 2})], {}),
        ([(5, {}, {}), (4, {}, {})], {1: 0}),  # rank 0 is in a collective
        ([(5, {1: 3}, {}), (5, {}, {0: 2})], {1: 0}),  # a message is on its way
        ([(5, {1: 2}, {}), (5, {}, {0: 3})], {0: 1}),  # rank 1 waits for a message
        # One message from rank 1 and one missing from rank 2 do not balance.
        ([(0, {}, {2: 1}), (0, {0: 1}, {}), (0, {}, {})], {0: 1, 2: 0}),
        ([(0, {}, {ANY: 2}), (0, {0: 1}, {}), (0, {0: 1}, {})], {}),
        ([(0, {}, {ANY: 1}), (0, {0: 1}, {}), (0, {0: 1}, {})], {0: 1}),
        ([(0, {}, {ANY: 3}), (0, {0: 1}, {}), (0, {0: 1}, {})], {1: 0, 2: 0}),  # either may be the one
    ],
)
def test_ranks_meet_where_no_rank_waits_for_another(ranks: list[Case], expected: dict[int, int]) -> None:
    positions = {rank: Position(*one) for rank, one in enumerate(ranks)}
    assert behind(positions) | awaited_messages(positions) == expected


def test_messages_are_counted_by_peer_in_each_group() -> None:
    class Group:
        def send(self, tensors: list[Any], peer: int, tag: int) -> str:
            return f"sent {tensors} to {peer} as {tag}"

        def recv(self, _tensors: list[Any], peer: int, _tag: int) -> str:
            return f"received from {peer}"

        def recv_anysource(self, _tensors: list[Any], _tag: int) -> str:
            return "received"

    group = Group()
    assert messages.counts_of(group) is None
    messages.watch(Group)
    assert group.send([1], 2, 0) == "sent [1] to 2 as 0"
    assert group.recv([1], 2, 0) == "received from 2"
    assert group.recv([1], 1, 0) == "received from 1"
    assert group.recv_anysource([1], 0) == "received"
    found, other = messages.counts_of(group), messages.counts_of(Group())
    assert found is not None
    assert other is not None
    assert (found.sent, found.received, found.total) == ({2: 1}, {2: 1, 1: 1, ANY: 1}, 4)
    assert other.total == 0

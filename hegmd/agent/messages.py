"""Counts the messages that this process sends and receives in each process group, by peer.

A pipeline's stages send and receive different numbers of messages, so ranks are at one place in their training where
each pair has sent as many messages as it has received, and where all have started the same collectives. Messages are
counted when they start, at the methods of `ProcessGroup` that `torch.distributed` calls. C++ code sends none by itself.

In a process whose agent was attached late the counts are unknown. Changes nothing of a message.
"""

from __future__ import annotations

import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

_METHODS = ("send", "recv", "recv_anysource")
#: The peer of a message that may come from any rank.
ANY = -1


class MessageCounts:
    """The messages of one group: how many this rank has started to send and to receive, by the peer's rank in it."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    @property
    def total(self) -> int:
        return sum(self.sent.values()) + sum(self.received.values())


_counts: weakref.WeakKeyDictionary[Any, MessageCounts] = weakref.WeakKeyDictionary()
_watched: list[type] = []


def watch(group_class: Any) -> None:
    """Count the messages of all groups of that class from now on. It is ProcessGroup, and no group exists yet."""
    if not all(hasattr(group_class, name) for name in _METHODS):
        return  # this PyTorch was built without torch.distributed
    group_class.send = _counting(group_class.send, lambda counts: counts.sent, has_peer=True)
    group_class.recv = _counting(group_class.recv, lambda counts: counts.received, has_peer=True)
    group_class.recv_anysource = _counting(group_class.recv_anysource, lambda counts: counts.received, has_peer=False)
    _watched.append(group_class)


def counts_of(group: Any) -> MessageCounts | None:
    """Return the messages of that group; None if they are not known."""
    if not isinstance(group, tuple(_watched)):
        return None
    return _counts.get(group) or MessageCounts()


def _counting(original: Any, part: Callable[[MessageCounts], dict[int, int]], *, has_peer: bool) -> Any:
    def method(self: Any, tensors: Any, *args: Any, **named: Any) -> Any:
        counts = _counts.get(self)
        if counts is None:
            counts = _counts[self] = MessageCounts()
        peer = ANY
        if has_peer:
            peer = args[0] if args else next((named[name] for name in ("dstRank", "srcRank") if name in named), ANY)
        by_peer = part(counts)
        by_peer[peer] = by_peer.get(peer, 0) + 1
        return original(self, tensors, *args, **named)

    method._torchdynamo_disable = True  # type: ignore[attr-defined] # what torch.compiler.disable sets
    method.__name__ = method.__qualname__ = getattr(original, "__name__", "send")
    method.__doc__ = getattr(original, "__doc__", None)
    return method


class Position:
    """How far one rank of a group is: the collectives and the messages that it has started."""

    __slots__ = ("collectives", "received", "sent")

    def __init__(self, collectives: int, sent: Mapping[int, int], received: Mapping[int, int]) -> None:
        self.collectives = collectives
        self.sent = sent
        self.received = received


def positions_of(stated: Iterable[Sequence[Any]]) -> dict[int, Position]:
    """Return the positions of a group's ranks, from what each has stated: its rank, collectives, sent and received."""
    return {rank: Position(number, dict(sent), dict(received)) for rank, number, sent, received in stated}


def behind(positions: Mapping[int, Position]) -> dict[int, int]:
    """Return each rank of a group that has started fewer collectives than another one, with the furthest one."""
    furthest = max(positions, key=lambda rank: positions[rank].collectives)
    return {rank: furthest for rank in positions if positions[rank].collectives < positions[furthest].collectives}


def awaited_messages(positions: Mapping[int, Position]) -> dict[int, int]:
    """Return each rank of a group that another one waits for, with that one, if it is for a message.

    Such a rank has not sent what the other receives, or has not received what the other has sent.
    """
    found: dict[int, int] = {}
    for receiver, own in positions.items():
        unread = {
            sender: other.sent.get(receiver, 0) - own.received.get(sender, 0) for sender, other in positions.items()
        }
        late = [sender for sender, count in unread.items() if count < 0]
        early = [sender for sender, count in unread.items() if count > 0]
        # A message from any rank may be any of those that were sent to this one.
        surplus = sum(unread[sender] for sender in early) - own.received.get(ANY, 0)
        if surplus > 0:
            found.setdefault(receiver, early[0])
        elif surplus < 0:
            late = [sender for sender in positions if sender != receiver]
        for sender in late:
            found.setdefault(sender, receiver)
    return found

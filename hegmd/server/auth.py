"""Permissions: pure decisions from the peer's credentials, all in this module.

uid and gids come from the socket (SO_PEERCRED, SO_PEERGROUPS); nothing that a peer says about itself counts. Root, the
daemon's own user and the group `hegm` may act on every process and on the daemon; other users on their own processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hegmd.errors import DENIED, HegmError
from hegmd.protocol.messages import BeginProof, Caller, Cancel, EndProof, Hello, Reload, Request, SimulateFault
from hegmd.protocol.operations import Operation, OperationProgress, StoryLine, Wait
from hegmd.protocol.snapshots import Event, GpuProcess

# Requests that change the node as a whole. Every peer may make the others; those that act on processes
# check each process with `may_act_on`.
NODE_WIDE: frozenset[type[Request]] = frozenset((BeginProof, EndProof, Reload, SimulateFault))

# Requests that a connection needs; never refused.
ALWAYS: frozenset[type[Request]] = frozenset((Hello, Cancel))

_HIDDEN = "message hidden: another user's job"
_HIDDEN_HINT = "ask its owner, or an administrator of hegmd"


class Peer(NamedTuple):
    """The process at the other end of a connection, as the kernel described it when it connected."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()


class Policy(NamedTuple):
    """The users that this daemon serves."""

    daemon_uid: int
    admin_gid: int | None = None
    own_user_only: bool = False

    def may_connect(self, peer: Peer) -> bool:
        """Return True if the peer is served. A user's private daemon serves that user and root."""
        return not self.own_user_only or peer.uid in (0, self.daemon_uid)

    def may_act_on_all(self, peer: Peer) -> bool:
        """Return True if the peer may act on processes of every user, and on the daemon."""
        if peer.uid in (0, self.daemon_uid):
            return True
        return self.admin_gid is not None and (peer.gid == self.admin_gid or self.admin_gid in peer.groups)

    def may_act_on(self, peer: Peer, owner_uid: int | None) -> bool:
        """Return True if the peer may act on a process of that owner. An unknown owner is never the peer."""
        return self.may_act_on_all(peer) or (owner_uid is not None and owner_uid == peer.uid)

    def check(self, peer: Peer, request: type[Request]) -> None:
        """Raise DENIED unless the peer may make this request."""
        if request in ALWAYS:
            return
        if request in NODE_WIDE and not self.may_act_on_all(peer):
            raise HegmError(
                DENIED,
                f"{request.op} is for root and the group that administers hegmd; you are uid {peer.uid}",
                "run it with sudo, or have an administrator add you to the group: usermod -aG hegm USER",
                {"uid": peer.uid, "op": request.op},
            )

    def describe(self, peer: Peer) -> Caller:
        """Return the peer's identity as the welcome message reports it."""
        return Caller(uid=peer.uid, gid=peer.gid, pid=peer.pid, may_act_on_all=self.may_act_on_all(peer))

    def visible(self, peer: Peer, process: GpuProcess) -> GpuProcess:
        """Return the process as the peer may see it: command lines of other users are hidden, because they may contain
        secrets."""
        if process.command is None or self.may_act_on(peer, process.uid):
            return process
        hidden = "command line hidden: another user's process"
        return process.replace(command=None, note=hidden if process.note is None else f"{process.note}; {hidden}")

    def visible_event(self, peer: Peer, event: Event) -> Event:
        """Return the event as the peer may see it: what failed in a job of another user can be the text of an error of
        its script."""
        uid = event.facts.get("uid")
        if not isinstance(uid, int) or self.may_act_on(peer, uid):
            return event
        facts = {name: event.facts[name] for name in ("job", "uid") if name in event.facts}
        return event.replace(message=_HIDDEN, facts=facts)

    def visible_operation(self, peer: Peer, operation: Operation) -> Operation:
        """Return the operation as the peer may see it: its failure can quote the script, and name paths."""
        if self.may_act_on(peer, operation.owner_uid):
            return operation
        failure = None if operation.failure is None else operation.failure.replace(message=_HIDDEN, hint=_HIDDEN_HINT)
        return operation.replace(failure=failure, waits=_visible_wait(operation.waits), note=None)

    def visible_story(self, peer: Peer, owner_uid: int | None, story: Iterable[StoryLine]) -> tuple[StoryLine, ...]:
        """Return the history of an operation of that owner as the peer may see it."""
        may = self.may_act_on(peer, owner_uid)
        return tuple([line if may or not line.detail else line.replace(detail=_HIDDEN) for line in story])

    def visible_progress(self, peer: Peer, owner_uid: int | None, progress: OperationProgress) -> OperationProgress:
        """Return the progress of an operation of that owner as the peer may see it."""
        if self.may_act_on(peer, owner_uid):
            return progress
        return progress.replace(waits=_visible_wait(progress.waits))


def _visible_wait(waits: Wait | None) -> Wait | None:
    return None if waits is None else Wait(why=_HIDDEN, next=_HIDDEN_HINT)

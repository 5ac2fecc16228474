"""The handlers of requests about sharing GPUs: translate between messages and `sharing`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hegmd.protocol import messages as m
from hegmd.server.auth import Policy
from hegmd.server.dispatch import Handler
from hegmd.server.session import Call
from hegmd.sharing.requests import Caller, SharingRequests


class SharingHandlers:
    """A method per message."""

    def __init__(self, policy: Policy, sharing: SharingRequests) -> None:
        self._policy = policy
        self._sharing = sharing

    def table(self) -> Mapping[type[m.Request], Handler]:
        return {
            m.MakeRoom: self.make_room,
            m.WaitForRoom: self.wait_for_room,
            m.Release: self.release,
            m.Queue: self.queue,
            m.SetPriority: self.set_priority,
            m.PlaceJob: self.place_job,
        }

    async def make_room(self, call: Call, request: m.MakeRoom) -> m.RoomReply:
        return await self._sharing.make_room(request, self.caller(call), call.emit)

    async def wait_for_room(self, call: Call, request: m.WaitForRoom) -> m.RoomReply:
        return await self._sharing.wait_for_room(request, self.caller(call), call.emit)

    async def release(self, call: Call, request: m.Release) -> m.Released:
        return await self._sharing.release(request, self.caller(call))

    async def queue(self, call: Call, _: m.Queue) -> m.QueueReply:
        return await self._sharing.queue(self.caller(call))

    async def set_priority(self, call: Call, request: m.SetPriority) -> m.JobReply:
        return m.JobReply(job=await self._sharing.set_priority(request, self.caller(call)))

    async def place_job(self, call: Call, request: m.PlaceJob) -> m.JobPlaced:
        return await self._sharing.place(request, self.caller(call), call.emit)

    def caller(self, call: Call) -> Caller:
        peer = call.peer
        may = partial(self._policy.may_act_on, peer)
        return Caller(peer.pid, peer.uid, self._policy.may_act_on_all(peer), may)

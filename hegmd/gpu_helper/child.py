"""The GPU helper's process: requests in, results out, each on a thread of its own, killable at any moment.

    python -m hegmd.gpu_helper.child DESCRIPTOR   (0, where the daemon starts it)

Driver calls block, some for seconds, some for good; here they block a thread, and the daemon kills all of this when one
is over its time. So nothing may be here that nobody else has: what is filled belongs to descriptors that the daemon
holds. The process ends when the socket does, without waiting for threads that are in the driver, and the kernel kills
it when the daemon is gone, even if a call never returns.

While it has requests under way it says so every second, from a thread that waits for nothing else: the daemon tells by
that a driver that takes its time from a helper that cannot run any more.

Owns the life of the process. What a request means is in `requests`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from hegmd.errors import INTERNAL, HegmError
from hegmd.gpu_helper.wire import BEAT_S, Channel, Handler, Request, senseless, told
from hegmd.system.descriptors import Descriptors

_PR_SET_PDEATHSIG = 1


class Child:
    """Answers requests until the socket ends. `held` counts what would be gone with this process."""

    def __init__(self, channel: Channel, requests: Mapping[str, Handler], held: Callable[[], int] = lambda: 0) -> None:
        self._channel = channel
        self._requests = requests
        self._held = held
        self._guard = threading.Lock()
        self._under_way: dict[int, float] = {}

    def serve(self, hello: Mapping[str, Any]) -> None:
        """Say that it can work, then answer until the daemon is gone. Raises PeerError for what is no request."""
        hello = {"pid": os.getpid(), "beat_s": BEAT_S, **hello}
        self._channel.send({"hello": hello})
        threading.Thread(target=self._beat, args=(float(hello["beat_s"]),), name="beat", daemon=True).start()
        while (came := self._channel.receive()) is not None:
            message, fds = came
            try:
                number, op, args = int(message["id"]), str(message["op"]), dict(message["args"])
            except (KeyError, TypeError, ValueError) as error:
                fds.close()
                raise senseless(f"a message that is no request: {error!r}") from error
            with self._guard:
                self._under_way[number] = time.monotonic()
            threading.Thread(target=self._see_through, args=(number, op, args, fds), name=op, daemon=True).start()

    def _beat(self, beat_s: float) -> None:
        """Say what is under way, again and again, for as long as the process lives."""
        never = threading.Event()
        while not never.wait(beat_s):
            now = time.monotonic()
            with self._guard:
                under_way = [[number, round(now - began, 3)] for number, began in self._under_way.items()]
            if under_way:
                self._say({"beat": under_way})

    def _see_through(self, number: int, op: str, args: Mapping[str, Any], fds: Descriptors) -> None:
        try:
            self._answer(number, op, args, fds)
        finally:
            with self._guard:
                del self._under_way[number]

    def _answer(self, number: int, op: str, args: Mapping[str, Any], fds: Descriptors) -> None:
        def tell(event: Mapping[str, object]) -> None:
            self._channel.send({"id": number, "event": event})

        with fds:
            try:
                answer = self._handler(op)(Request(args, fds, tell))
            except HegmError as error:
                self._say({"id": number, "err": told(error), "held": self._held()})
                return
            except Exception as error:  # noqa: BLE001 - the edge where whatever went wrong becomes a reply
                traceback.print_exc()
                self._say({"id": number, "err": told(_unexpected(op, error)), "held": self._held()})
                return
        with answer.fds:
            sent = answer.fds.view()
            self._say({"id": number, "ok": answer.values, "held": self._held()}, sent)

    def _handler(self, op: str) -> Handler:
        handler = self._requests.get(op)
        if handler is None:
            raise senseless(f"the unknown request {op!r}")
        return handler

    def _say(self, message: Mapping[str, object], fds: tuple[int, ...] = ()) -> None:
        try:
            self._channel.send(message, fds)
        except OSError:  # the daemon is gone, and so is this process in a moment
            return


def run(requests: Callable[[], tuple[Mapping[str, Handler], Callable[[], int], Mapping[str, object]]]) -> None:
    """The whole life of the process. `requests` gets it ready: the table, what counts as held, and what hello says."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=int(sys.argv[-1])))
    status = 1
    try:
        table, held, hello = requests()
        Child(channel, table, held).serve(hello)
        status = 0
    except HegmError as error:
        channel.send({"err": told(error)})
    except Exception:  # noqa: BLE001 - said where the daemon keeps it; the socket's end tells the rest
        traceback.print_exc()
    finally:
        # Not by way of the interpreter: threads may be in the driver for good, and libcuda tidies up at exit.
        os._exit(status)


def _unexpected(op: str, error: Exception) -> HegmError:
    return HegmError(
        INTERNAL,
        f"hegmd's helper failed at `{op}`: {error!r}",
        "report this with the lines of the daemon's log around it",
    )


def main() -> None:
    """The helper as the daemon starts it."""
    from hegmd.gpu_helper.requests import make_ready

    run(make_ready)


if __name__ == "__main__":
    main()

"""The GPU helper's process: each request runs on a thread of its own. It can be killed at any moment.

    python -m hegmd.gpu_helper.child DESCRIPTOR   (0, where the daemon starts it)

A driver call blocks a thread for seconds, or forever. The daemon kills the process if a call exceeds its deadline.
So the process holds the only copy of nothing: the daemon holds descriptors of the memory that it fills. The process
ends with its socket and does not wait for threads in the driver. The kernel kills it when the daemon ends.

While requests run, a separate thread reports that every second. So the daemon can tell a slow driver call from a
process that no longer runs.

Owns the life of the process. `requests` knows what a request means.
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
from hegmd.gpu_helper.wire import BEAT_S, Channel, Handler, Request, error_to_wire, senseless
from hegmd.system.descriptors import Descriptors

_PR_SET_PDEATHSIG = 1


class Child:
    """Answers requests until the socket ends. `held` counts what would be lost with this process."""

    def __init__(self, channel: Channel, requests: Mapping[str, Handler], held: Callable[[], int] = lambda: 0) -> None:
        self._channel = channel
        self._requests = requests
        self._held = held
        self._guard = threading.Lock()
        self._ending = threading.Lock()
        self._under_way: dict[int, float] = {}

    def serve(self, hello: Mapping[str, Any]) -> None:
        """Send hello, then answer requests until the daemon closes the socket. Raises PeerError for an invalid
        request."""
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
            threading.Thread(target=self._run_to_end, args=(number, op, args, fds), name=op, daemon=True).start()

    def _beat(self, beat_s: float) -> None:
        """Report the running requests periodically, as long as the process lives."""
        never = threading.Event()
        while not never.wait(beat_s):
            now = time.monotonic()
            with self._guard:
                under_way = [[number, round(now - began, 3)] for number, began in self._under_way.items()]
            if under_way:
                self._say({"beat": under_way})

    def _run_to_end(self, number: int, op: str, args: Mapping[str, Any], fds: Descriptors) -> None:
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
                self._end(number, {"err": error_to_wire(error)})
                return
            except Exception as error:  # noqa: BLE001 - the edge where whatever went wrong becomes a reply
                traceback.print_exc()
                self._end(number, {"err": error_to_wire(_unexpected(op, error))})
                return
        with answer.fds:
            sent = answer.fds.view()
            self._end(number, {"ok": answer.values}, sent)

    def _end(self, number: int, result: Mapping[str, object], fds: tuple[int, ...] = ()) -> None:
        """Send the result of a request, with the number of what is held: no later number may be sent before it."""
        with self._ending:
            self._say({"id": number, **result, "held": self._held()}, fds)

    def _handler(self, op: str) -> Handler:
        handler = self._requests.get(op)
        if handler is None:
            raise senseless(f"the unknown request {op!r}")
        return handler

    def _say(self, message: Mapping[str, object], fds: tuple[int, ...] = ()) -> None:
        try:
            self._channel.send(message, fds)
        except OSError:  # the daemon has ended; this process ends next
            return


def run(requests: Callable[[], tuple[Mapping[str, Handler], Callable[[], int], Mapping[str, object]]]) -> None:
    """Run the process to its end. `requests` returns the request table, what counts as held, and the fields of
    hello."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=int(sys.argv[-1])))
    status = 1
    try:
        table, held, hello = requests()
        Child(channel, table, held).serve(hello)
        status = 0
    except HegmError as error:
        channel.send({"err": error_to_wire(error)})
    except Exception:  # noqa: BLE001 - written to the log of the daemon; the closed socket reports the end
        traceback.print_exc()
    finally:
        # Skip the interpreter's exit: threads may be blocked in the driver, and libcuda cleans up at exit.
        os._exit(status)


def _unexpected(op: str, error: Exception) -> HegmError:
    return HegmError(
        INTERNAL,
        f"hegmd's helper failed at `{op}`: {error!r}",
        "report this with the lines of the daemon's log around it",
    )


def main() -> None:
    """The entry point of the helper."""
    from hegmd.gpu_helper.requests import make_ready

    run(make_ready)


if __name__ == "__main__":
    main()

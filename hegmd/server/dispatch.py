"""From a request to its answer: permission, handler, and records of it (metrics, audit, log).

Only here is an unexpected exception of a handler caught: it becomes the error `internal` with a reference to its
traceback in the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from hegmd.errors import INTERNAL, Bug, HegmError
from hegmd.protocol.messages import Request
from hegmd.protocol.record import Record
from hegmd.server.auth import Policy
from hegmd.server.session import Call
from hegmd.system.resource_errors import scarcity
from hegmd.telemetry.audit import Audit
from hegmd.telemetry.log import error_ref, fields, operation
from hegmd.telemetry.metrics import Counters

logger = logging.getLogger(__name__)

# The second argument is the request, of the class that the table names for it.
Handler = Callable[[Call, Any], Awaitable[Record]]


class Dispatcher:
    """Answers calls by a table from request classes to handlers."""

    def __init__(
        self, handlers: Mapping[type[Request], Handler], policy: Policy, counters: Counters, audit: Audit
    ) -> None:
        self._handlers = handlers
        self._policy = policy
        self._counters = counters
        self._audit = audit

    async def answer(self, call: Call) -> Record:
        """Return the reply to a call. Raises HegmError and passes cancellation on; both are counted and audited."""
        started = time.perf_counter()
        with operation(call.request.op, uid=call.peer.uid, pid=call.peer.pid) as operation_id:
            error: HegmError | None = None
            result = "cancelled"
            try:
                reply = await self._handle(call)
                result = "ok"
                return reply
            except HegmError as failure:
                error, result = failure, failure.code.name
                raise
            finally:
                took_s = time.perf_counter() - started
                # The caller chooses how long a stream lasts, so its time is not measured.
                self._counters.request(call.request.op, result, None if call.request.event else took_s)
                if call.request.changes_state:
                    self._audit.record(call.peer, call.request, result, error, took_s, operation_id)

    async def _handle(self, call: Call) -> Record:
        try:
            self._policy.check(call.peer, type(call.request))
            handler = self._handlers.get(type(call.request))
            if handler is None:
                raise Bug(f"no handler for {call.request.op}")
            return await handler(call, call.request)
        except Bug as bug:
            raise self._internal(call, bug) from bug
        except (HegmError, anyio.get_cancelled_exc_class()):
            raise
        except Exception as unexpected:  # the edge where every error becomes an answer
            if (scarce := scarcity(unexpected)) is not None:
                raise scarce from unexpected
            raise self._internal(call, unexpected) from unexpected

    def _internal(self, call: Call, cause: Exception) -> HegmError:
        reference = error_ref()
        logger.error("%s failed [%s]", call.request.op, reference, exc_info=cause, extra=fields(error_ref=reference))
        return HegmError(
            INTERNAL,
            f"{call.request.op} failed inside hegmd: {type(cause).__name__} [{reference}]",
            f"report it with what `journalctl -u hegmd | grep -A30 {reference}` shows",
            {"reference": reference},
        )

"""The commands about operations: they send the request, show its progress, and report its result.

An operation belongs to the daemon and not to its command: it continues when the command is interrupted. So Ctrl-C asks
once, on a terminal only, whether to roll it back. If an operation fails, the command ends with the operation's error.
"""

from __future__ import annotations

import os
from contextlib import suppress

from hegmctl.arguments import absolute
from hegmctl.connection import of_kind
from hegmctl.grammar.rows import load
from hegmctl.operating_text import (
    AT_REST,
    cancelled_text,
    given_up_text,
    operation_text,
    plan_text,
    progress_text,
    story_text,
)
from hegmctl.output import ask, require_yes
from hegmctl.quantities import without_times
from hegmd.errors import CANCELLED, NOT_FOUND, USAGE, HegmError, code_named
from hegmd.protocol.connection import Failure, Progress
from hegmd.protocol.messages import (
    CancelOperation,
    Drain,
    Drained,
    DropOrphan,
    OperationReply,
    Orphans,
    OrphansReply,
    Resume,
    Story,
    StoryReply,
)
from hegmd.protocol.operations import WAITS_IN_QUEUE, OperationProgress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from hegmctl.cli import Session
    from hegmctl.connection import Connection
    from hegmctl.tables import Style
    from hegmd.protocol.connection import Reply
    from hegmd.protocol.messages import Request
    from hegmd.protocol.operations import Operation
    from hegmd.protocol.record import Record


def migrate(session: Session) -> int:
    arguments = session.arguments
    to, via = arguments.text("to"), arguments.text("via")
    if to is None and via is None:
        raise HegmError(
            USAGE, "migrate needs --to and a GPU", "name a GPU of `hegmctl gpus`: hegmctl migrate JOB --to gpu1"
        )
    python = arguments.text("python")
    changed, without = _environment(arguments.texts("env"))
    if via is None and (python is not None or changed or without):
        raise HegmError(USAGE, "--env and --python need --via restart", "add --via restart")
    if python is not None and os.sep in python:
        python = absolute(python)
    return carry_out(session, arguments.request(set=changed, unset=without, python=python))


def drain(session: Session) -> int:
    request = session.arguments.request()
    if session.arguments.texts("to") and not of_kind(request, Drain).to:
        raise HegmError(USAGE, "--to names no GPU", "name GPUs of `hegmctl gpus`: hegmctl drain gpu0 --to gpu1,gpu2")
    return carry_out(session, request)


def adopt(session: Session) -> int:
    """`hegmctl adopt`: the list, one job, or the end of some bytes."""
    arguments = session.arguments
    jobs, name = arguments.values("JOB"), arguments.text("drop")
    if len(jobs) > 1 or (jobs and name is not None):
        raise HegmError(USAGE, "adopt takes one JOB, or --drop and one name", "hegmctl adopt lists the orphans")
    if jobs:
        return carry_out(session, arguments.request())
    request: Request = Orphans()
    if name is not None:
        if not arguments.flag("yes"):
            with session.connect() as connection:
                found = connection.call(request, OrphansReply).orphans
            if all(orphan.name != name for orphan in found):
                raise HegmError(NOT_FOUND, f"there is no orphan {name[:80]!r}", "run: hegmctl adopt")
            lost = f"Drop {name}? The job of these bytes can then never continue"
            require_yes(lost, name, "run: hegmctl adopt")
        request = DropOrphan(name=name)
    with session.connect() as connection:
        reply = connection.call(request, request.reply)
    session.sink.answer(reply, _view(session, request))
    return 0


def cancel(session: Session) -> int:
    op_id, drops = session.arguments.required("ID"), session.arguments.flag("drop")
    if drops and not session.arguments.flag("yes"):
        with session.connect() as connection:
            connection.call(Story(id=op_id), StoryReply)
        lost = f"Drop the state of operation {op_id}? Its training can then never continue from there"
        require_yes(lost, f"the state of operation {op_id}", "run: hegmctl ops")
    with session.connect() as connection:
        reply = connection.call(CancelOperation(id=op_id, drop=drops), OperationReply)
    session.sink.answer(reply, given_up_text if drops else cancelled_text)
    return 0


def op(session: Session) -> int:
    """Run `hegmctl op`: show the operation now, or follow it to its end; write its timeline if requested."""
    arguments = session.arguments
    svg, html = arguments.text("svg"), arguments.text("html")
    if (svg or html) and not arguments.flag("timeline"):
        raise HegmError(USAGE, "--svg and --html are for a timeline", "add --timeline")
    request = of_kind(arguments.request(), Story)
    with session.connect() as connection:
        reply = _follow(session, connection, request.id) if request.follow else connection.call(request, StoryReply)
    if svg or html:
        from hegmctl.timeline_svg import html_of, svg_of, write_file

        for path, drawn in ((svg, svg_of), (html, html_of)):
            if path:
                write_file(path, drawn(reply))
                session.sink.note(f"the timeline of operation {request.id} is in {path}")
        return 0
    session.sink.answer(reply, _story_view(session))
    return 0


def _story_view(session: Session) -> Callable[[StoryReply, Style], list[str]]:
    """Return the renderer of the requested form. Each imports only what it needs."""
    if session.arguments.flag("timeline"):
        from hegmctl.timeline_text import timeline_text

        return timeline_text
    if session.arguments.flag("story"):
        from hegmctl.story_text import whole_story_text

        return whole_story_text
    return story_text


def _environment(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return what `--env` sets and removes: NAME=VALUE, or NAME alone."""
    changed: dict[str, str] = {}
    without: list[str] = []
    for word in words:
        name, sign, value = word.partition("=")
        if not name:
            raise HegmError(
                USAGE, f"--env {word!r} names no variable", "write --env NAME=VALUE, or --env NAME to unset"
            )
        if sign:
            changed[name] = value
        else:
            without.append(name)
    return changed, tuple(without)


class Watched:
    """The known facts about a request, for code that must know its result in every case."""

    __slots__ = ("progress", "refusal", "stays")

    def __init__(self) -> None:
        self.progress: list[OperationProgress] = []
        #: Called if a request was abandoned before its operation was created: the caller then waits until it is undone.
        self.stays: Callable[[], object] | None = None
        self.refusal: HegmError | None = None

    @property
    def has_begun(self) -> bool:
        """True if an operation was created."""
        return any(progress.phase != "reading" for progress in self.progress)

    def leave(self, next_message: Callable[[], Reply | Failure | Progress]) -> None:
        """Read on after the request was cancelled."""
        if self.stays is None or self.has_begun:
            return
        self.stays()
        with suppress(HegmError):  # then the result stays unknown
            while isinstance(message := next_message(), Progress):
                self.progress.append(of_kind(message.event, OperationProgress))
            self.refusal = message.error if isinstance(message, Failure) else None


def carry_out(session: Session, request: Request, fds: Sequence[int] = (), watched: Watched | None = None) -> int:
    """Run operations and show their progress and results. Returns the exit status. `fds` stay the caller's."""
    watched = Watched() if watched is None else watched
    with session.connect() as connection:
        reply = _watch(session, connection, request, watched, fds)
    is_dry_run = isinstance(request, Resume) and request.dry_run
    if isinstance(reply, OperationReply) and reply.operation is None and (reply.recovered is None or is_dry_run):
        session.sink.answer(reply, plan_text)
        return 0
    session.sink.element(reply, _view(session, request))
    if isinstance(reply, OperationReply) and reply.operation is not None:
        return _status_of(reply.operation)
    if not isinstance(reply, Drained):
        return 0
    steps = [_status_of(operation) for operation in reply.operations]
    left = [code_named(reason.code).exit_status for reason in reply.left[:1]]
    # A swap has one reason, for which its steps were cancelled. The jobs of a drain have one each.
    statuses = steps + left if isinstance(request, Drain) else left + steps
    return next((status for status in statuses if status), 0)


def _view(session: Session, request: Request) -> Callable[[Record, Style], list[str]]:
    """Return the renderer that the row names for the reply to that request."""
    view: Callable[[Record, Style], list[str]] = next(
        load(form.render) for form in session.arguments.command.forms if form.request == request.op
    )
    return view


def _follow(session: Session, connection: Connection, op_id: str) -> StoryReply:
    """Show an operation's progress until it waits or ends, and return its history."""
    return of_kind(_show(session, connection, Story(id=op_id, follow=True), Watched()), StoryReply)


def _status_of(operation: Operation) -> int:
    """Return the exit status of its result; a running operation has not failed."""
    return 0 if operation.failure is None else code_named(operation.failure.code).exit_status


def _watch(
    session: Session, connection: Connection, request: Request, watched: Watched, fds: Sequence[int] = ()
) -> Record:
    """Return the reply to the request, and show progress meanwhile."""
    try:
        return _show(session, connection, request, watched, fds)
    except KeyboardInterrupt:
        progress = watched.progress
        if progress and not watched.has_begun:
            session.sink.note("the processes restored so far are ended; the image is unchanged")
            raise
        if progress and progress[-1].phase == WAITS_IN_QUEUE:
            session.sink.note("the job stays in the queue, and resumes in its turn; hegmctl suspend takes it out")
            raise
        if not progress or not progress[-1].id:  # still being planned, or just started
            if not getattr(request, "dry_run", False) and watched.refusal is None:
                session.sink.note("an operation that was started continues: run hegmctl ops")
            raise
        _interrupted(session, connection, progress[-1].id)


def _show(
    session: Session, connection: Connection, request: Request, watched: Watched, fds: Sequence[int] = ()
) -> Record:
    shown: set[str | None] = {None}
    stream = connection.stream(request, OperationProgress, request.reply, fds=fds, patient=True, leave=watched.leave)
    try:
        while True:
            progress = next(stream)
            watched.progress.append(progress)
            if progress.phase in AT_REST:  # it has reached its goal, which the reply says
                progress = progress.replace(waits=None)
            why = None if progress.waits is None else without_times(progress.waits.why)
            # A restart always waits for its next process: that is reported only if it takes long, like its steps.
            session.sink.progress(progress, progress_text, at_once=why not in shown and progress.doing is None)
            shown.add(why)
    except StopIteration as end:
        answer: Record = end.value
        return answer
    finally:
        session.sink.end_progress()
        stream.close()


def _interrupted(session: Session, connection: Connection, op_id: str) -> NoReturn:
    """Handle Ctrl-C: ask once what to do with the operation. Raises KeyboardInterrupt if it continues."""
    rest = session.arguments.command.interrupted
    answer = ask(f"Cancel operation {op_id}? Otherwise it continues [y/N] ")
    if answer is None or answer.strip().lower() not in ("y", "yes"):
        session.sink.note(f"operation {op_id} continues: see hegmctl op {op_id}; end it: hegmctl cancel {op_id}{rest}")
        raise KeyboardInterrupt
    try:
        connection.call(CancelOperation(id=op_id), OperationReply)
    except HegmError as refusal:  # it is over or too far; its result counts then
        session.sink.note(f"{refusal.message}; {refusal.hint}")
    ended = _follow(session, connection, op_id).operation
    session.sink.element(OperationReply(operation=ended), operation_text)
    if ended.failure is None:
        raise HegmError(CANCELLED, f"operation {op_id} could no longer be cancelled", "reverse it with another command")
    raise HegmError(CANCELLED, f"operation {op_id} was cancelled{rest}", "run the command again to retry")

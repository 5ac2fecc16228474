"""The commands about sharing GPUs: `make-room` and `queue`, and the wait of `hegmctl run --gpu auto`.

They wait for a daemon that restarts meanwhile: leases and the queue outlive it.
"""

from __future__ import annotations

from time import monotonic, sleep

from hegmctl.connection import of_kind
from hegmctl.quantities import without_times
from hegmctl.sharing_text import lease_note, queue_text, room_progress_text, room_text
from hegmctl.watch import RETRY_S, is_passing, watch
from hegmd.errors import BAD_REQUEST, INCOMPATIBLE, USAGE, HegmError
from hegmd.protocol.messages import (
    JobPlaced,
    MakeRoom,
    PlaceJob,
    PlaceProgress,
    Queue,
    QueueReply,
    RoomProgress,
    RoomReply,
    WaitForRoom,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.cli import Session
    from hegmctl.connection import Connection
    from hegmd.protocol.messages import Request

# How long a command waits for a daemon that has ended.
BACK_WITHIN_S = 60.0


def make_room(session: Session) -> int:
    arguments = session.arguments
    if arguments.whole("bytes") is None:
        raise HegmError(USAGE, "make-room needs --bytes and a size", "hegmctl make-room --gpu gpu0 --bytes 60GiB")
    if arguments.whole("for") is not None and arguments.seconds("seconds") is not None:
        raise HegmError(USAGE, "--for and --seconds exclude each other", "leave one of the two out")
    request = of_kind(arguments.request(), MakeRoom)
    if request.until_free and not request.dry_run:
        reply = _wait_for_room(session, request)
    else:
        with session.connect() as connection:
            reply = connection.call(request, RoomReply)
    session.sink.element(reply, room_text)
    if reply.lease is not None:
        session.sink.note(lease_note(reply.lease))
    return 0


def _wait_for_room(session: Session, request: MakeRoom) -> RoomReply:
    """Wait until the memory is free, and for a daemon that restarts meanwhile."""
    began, lease, shown, away_since, was_there = monotonic(), "", "", 0.0, False
    while True:
        left_s = None if request.limit_s is None else max(0.001, request.limit_s - (monotonic() - began))
        asked: Request = WaitForRoom(lease=lease, limit_s=left_s) if lease else request.replace(limit_s=left_s)
        try:
            with session.connect() as connection:
                was_there = True
                stream = connection.stream(asked, RoomProgress, RoomReply, patient=True)
                try:
                    while True:
                        progress = next(stream)
                        lease, away_since = progress.lease, 0.0
                        is_news = without_times(progress.waits) != shown
                        shown = without_times(progress.waits)
                        session.sink.progress(progress, room_progress_text, at_once=is_news)
                except StopIteration as end:
                    return of_kind(end.value, RoomReply)
                finally:
                    session.sink.end_progress()
                    stream.close()
        except HegmError as error:
            if not was_there or not is_passing(error):
                raise
            away_since = _pause(session, error, away_since)


def _pause(session: Session, error: HegmError, away_since: float) -> float:
    """Wait for the daemon a little; since when it is away. Raises `error` when that is too long."""
    now = monotonic()
    if not away_since:
        session.sink.note(f"waiting for the daemon: {error.message}")
        away_since = now
    if now - away_since > BACK_WITHIN_S:
        raise error
    sleep(RETRY_S)
    return away_since


def queue(session: Session) -> int:
    def fetch(connection: Connection) -> QueueReply:
        return connection.call(Queue(), QueueReply)

    interval_s = session.arguments.seconds("watch")
    if interval_s is not None:
        return watch(session, interval_s, fetch, queue_text)
    with session.connect() as connection:
        reply = fetch(connection)
    session.sink.answer(reply, queue_text)
    return 0


def wait_for_gpus(session: Session, request: PlaceJob, socket: str | None) -> tuple[str, ...]:
    """Wait until the daemon gives this job its GPUs, and return their ids. Writes what it waits for to stderr."""
    shown, away_since, was_there = "", 0.0, False
    while True:
        try:
            with session.connect(socket=socket) as connection:
                was_there = True
                stream = connection.stream(request, PlaceProgress, JobPlaced, patient=True)
                try:
                    while True:
                        progress = next(stream)
                        away_since = 0.0
                        text = _waiting_text(progress)
                        if without_times(text) != shown:
                            session.sink.note(text)
                        shown = without_times(text)
                except StopIteration as end:
                    return _all_gpus(of_kind(end.value, JobPlaced), request)
                finally:
                    stream.close()
        except HegmError as error:
            if error.code in (BAD_REQUEST, INCOMPATIBLE) and not shown and not error.facts.get("final"):
                hint = "name a GPU with --gpu, or upgrade hegmd"
                raise HegmError(error.code, f"this daemon cannot choose a GPU: {error.message}", hint) from error
            if not was_there or not is_passing(error):
                raise
            away_since = _pause(session, error, away_since)


def _all_gpus(placed: JobPlaced, request: PlaceJob) -> tuple[str, ...]:
    """Return the GPUs of a job. Raises INCOMPATIBLE if an older daemon has chosen one where several were requested."""
    gpus = tuple(placed.gpu.split(","))
    if len(gpus) != request.gpu_count:
        message = f"this daemon has chosen {placed.gpu}, and {request.gpu_count} GPUs were requested"
        raise HegmError(INCOMPATIBLE, message, "name one GPU with --gpu, or upgrade hegmd", {"final": True})
    return gpus


def _waiting_text(progress: PlaceProgress) -> str:
    ahead = "" if not progress.ahead else f"; {progress.ahead} in the queue before it"
    return f"the job waits: {progress.waits}{ahead}. Ctrl-C leaves the queue"

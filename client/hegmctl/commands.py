"""One function for each command: ask, hand the answer to the sink, return the exit status.

What a command needs beyond the connection it imports itself, so that no command pays for another. Errors are not
handled here: they go up to `cli`, which tells the user and knows the exit status of each.

Longer than 400 lines because it is one list of commands, most of them a call of what does the work.
"""

from __future__ import annotations

from hegmd.errors import ATTENTION, INCOMPATIBLE, NOT_FOUND, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from hegmctl.answers import DaemonVersion
    from hegmctl.connection import Connection
    from hegmctl.session import Session
    from hegmctl.tables import Style
    from hegmd.protocol.messages import ProcessesReply, Welcome
    from hegmd.protocol.snapshots import Check

    Command = Callable[[Session], int]

DOCTOR_TIMEOUT_S = 120.0
COMPLETION_TIMEOUT_S = 1.0


def gpus(session: Session) -> int:
    """`hegmctl gpus`."""
    from hegmctl.inventory_text import gpus_in_full, gpus_text

    with session.connect() as connection:
        reply = connection.gpus()
    session.sink.answer(reply, gpus_in_full if session.arguments.flag("long") else gpus_text)
    return 0


def ps(session: Session) -> int:
    """`hegmctl ps`, once or again and again."""
    from hegmctl.inventory_text import processes_text, ways_text

    arguments = session.arguments
    pids = arguments.wholes("PID")
    on_gpus = tuple(gpu for text in arguments.texts("gpu") for gpu in text.split(",") if gpu)

    def look(connection: Connection) -> ProcessesReply:
        return connection.processes(pids, on_gpus, ways=arguments.flag("ways"))

    def view(reply: ProcessesReply, style: Style) -> list[str]:
        text = ways_text if arguments.flag("ways") else processes_text
        return text(reply, style, on_gpus)

    interval_s = arguments.seconds("watch")
    try:
        if interval_s is not None:
            from hegmctl.watch import watch

            return watch(session, interval_s, look, view)
        with session.connect() as connection:
            reply = look(connection)
    except HegmError as error:
        if error.code is NOT_FOUND and interval_s is not None and len(pids) == 1 and pids[0] < 1000:
            raise HegmError(
                error.code, error.message, f"a number of seconds is written as --watch={pids[0]}", error.facts
            ) from error
        raise
    session.sink.answer(reply, view)
    return 0


def events(session: Session) -> int:
    """`hegmctl events`, those remembered or also those to come."""
    from hegmctl.answers_text import event_text

    arguments = session.arguments
    since = arguments.whole("since") or 0
    kinds = arguments.texts("kind")
    run = arguments.text("run")
    if arguments.flag("follow"):
        from hegmctl.watch import follow

        return follow(session, since, kinds, event_text, run)
    shown = 0
    with session.connect() as connection:
        for event in connection.events(since, kinds=kinds, run=run):
            session.sink.element(event, event_text)
            shown += 1
    if not shown:
        session.sink.note("the daemon remembers no such event" if since or kinds else "the daemon remembers no event")
    return 0


def doctor(session: Session) -> int:
    """`hegmctl doctor`, by the daemon, or without one by ourselves."""
    from hegmctl.answers import DoctorAnswer
    from hegmctl.answers_text import check_text, doctor_summary
    from hegmctl.output import TextSink
    from hegmd.protocol.snapshots import Check

    checks: list[Check] = []

    def on_check(check: Check) -> None:
        checks.append(check)
        if isinstance(session.sink, TextSink):
            session.sink.element(check, check_text)

    try:
        connection = session.connect(DOCTOR_TIMEOUT_S)
    except HegmError as error:
        from hegmctl.node_checks import check_here

        on_check(Check(id="daemon", status="fail", summary=error.message, fix=error.hint))
        try:
            check_here(on_check)
        except HegmError as failure:  # a line like the others: it is part of what is wrong with the node
            on_check(Check(id="daemon.program", status="fail", summary=failure.message, fix=failure.hint))
    else:
        with connection:
            welcome = connection.welcome
            summary = f"hegmd {welcome.daemon_version} answers at {connection.endpoint.path}"
            on_check(Check(id="daemon", status="ok", summary=summary))
            connection.doctor(on_check)
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail", "skip")}
    answer = DoctorAnswer(checks=tuple(checks), **counts)
    session.sink.answer(answer, doctor_summary)
    return ATTENTION.exit_status if answer.fail else 0


def version(session: Session) -> int:
    """`hegmctl version`; content without a daemon."""
    from hegmctl.answers import VersionAnswer
    from hegmctl.answers_text import version_text
    from hegmctl.endpoint import find_endpoint
    from hegmd import __version__
    from hegmd.protocol.messages import SUPPORTED_VERSIONS, ErrorInfo

    endpoint = find_endpoint(session.arguments.text("socket"))
    welcome: Welcome | None = None
    info: ErrorInfo | None = None
    try:
        with session.connect() as connection:
            welcome = connection.welcome
    except HegmError as error:
        info = ErrorInfo(code=error.code.name, message=error.message, hint=error.hint, facts=error.facts)
    answer = VersionAnswer(
        version=__version__,
        protocols=SUPPORTED_VERSIONS,
        socket=endpoint.path,
        daemon=None if welcome is None else _daemon_version(welcome),
        error=info,
    )
    session.sink.answer(answer, version_text)
    # No daemon is a fact like another here; one that cannot be talked to is what the command is asked to find.
    return INCOMPATIBLE.exit_status if info is not None and info.code == INCOMPATIBLE.name else 0


def _daemon_version(welcome: Welcome) -> DaemonVersion:
    from hegmctl.answers import DaemonVersion

    return DaemonVersion(
        version=welcome.daemon_version,
        protocol=welcome.version,
        node=welcome.node,
        simulated=welcome.simulated,
        capabilities=welcome.capabilities,
        limits=welcome.limits,
        you=welcome.you,
        run=welcome.run,
    )


def config(session: Session) -> int:
    """`hegmctl config`, shown or read again."""
    from hegmctl.answers_text import config_text, reload_text

    with session.connect() as connection:
        if session.arguments.flag("reload"):
            session.sink.answer(connection.reload(), reload_text)
        else:
            session.sink.answer(connection.config(), config_text)
    return 0


def metrics(session: Session) -> int:
    """`hegmctl metrics`."""
    from hegmctl.answers_text import metrics_text

    with session.connect() as connection:
        session.sink.answer(connection.metrics(), metrics_text)
    return 0


def ping(session: Session) -> int:
    """`hegmctl ping`, once or more often on one connection."""
    from time import perf_counter

    from hegmctl.answers import PingAnswer
    from hegmctl.answers_text import ping_text

    asked = session.arguments.whole("count")
    times_s: list[float] = []
    with session.connect() as connection:
        for _ in range(1 if asked is None else asked):
            began = perf_counter()
            connection.ping()
            times_s.append(perf_counter() - began)
    answer = PingAnswer(
        version=connection.welcome.daemon_version,
        node=connection.welcome.node,
        socket=connection.endpoint.path,
        round_trips_s=tuple(times_s),
    )
    session.sink.answer(answer, ping_text)
    return 0


def simulate_hold(session: Session) -> int:
    """`hegmctl simulate hold`: hold it here, or become the command that is to hold it."""
    from hegmctl.answers_text import hold_text

    arguments = session.arguments
    with session.connect() as connection:
        reply = connection.simulate_hold(arguments.required("GPU"), arguments.whole("SIZE") or 0)
        if arguments.tail:
            from hegmctl.exec_command import become

            become(arguments.tail, keep=connection.fileno())
        session.sink.element(reply, hold_text)
        connection.wait_for_its_end()


def simulate_fault(session: Session) -> int:
    """`hegmctl simulate fault`."""
    from hegmctl.answers_text import faults_text

    arguments = session.arguments
    with session.connect() as connection:
        reply = connection.simulate_fault(arguments.required("TARGET"), arguments.required("FAULT"))
    session.sink.answer(reply, faults_text)
    return 0


def migrate(session: Session) -> int:
    """`hegmctl migrate`."""
    from hegmctl import move_commands

    return move_commands.migrate(session)


def suspend(session: Session) -> int:
    """`hegmctl suspend`."""
    from hegmctl import move_commands

    return move_commands.suspend(session)


def quiesce(session: Session) -> int:
    """`hegmctl quiesce`."""
    from hegmctl import move_commands

    return move_commands.quiesce(session)


def handoff(session: Session) -> int:
    """`hegmctl handoff`."""
    from hegmctl import imaging

    return imaging.handoff(session)


def resume(session: Session) -> int:
    """`hegmctl resume`."""
    from hegmctl import move_commands

    return move_commands.resume(session)


def checkpoint(session: Session) -> int:
    """`hegmctl checkpoint`."""
    from hegmctl import imaging

    return imaging.checkpoint(session)


def restore(session: Session) -> int:
    """`hegmctl restore`."""
    from hegmctl import imaging

    return imaging.restore(session)


def drain(session: Session) -> int:
    """`hegmctl drain`."""
    from hegmctl import move_commands

    return move_commands.drain(session)


def swap(session: Session) -> int:
    """`hegmctl swap`."""
    from hegmctl import move_commands

    return move_commands.swap(session)


def cancel(session: Session) -> int:
    """`hegmctl cancel`."""
    from hegmctl import move_commands

    return move_commands.cancel(session)


def adopt(session: Session) -> int:
    """`hegmctl adopt`."""
    from hegmctl import move_commands

    return move_commands.adopt(session)


def ops(session: Session) -> int:
    """`hegmctl ops`."""
    from hegmctl.operating_text import operations_text
    from hegmd.protocol.messages import Operations, OperationsReply

    with session.connect() as connection:
        reply = connection.call(Operations(), OperationsReply)
    session.sink.answer(reply, operations_text)
    return 0


def op(session: Session) -> int:
    """`hegmctl op`, as it stands, or once it has come to rest."""
    from hegmctl.move_commands import follow
    from hegmctl.operating_text import story_text
    from hegmctl.story_text import whole_story_text
    from hegmd.protocol.messages import Story, StoryReply

    arguments = session.arguments
    op_id = arguments.required("ID")
    with session.connect() as connection:
        if arguments.flag("follow"):
            reply = follow(session, connection, op_id)
        else:
            reply = connection.call(Story(id=op_id), StoryReply)
    session.sink.answer(reply, whole_story_text if arguments.flag("story") else story_text)
    return 0


def run(session: Session) -> int:
    """`hegmctl run`: become the command, with the agent in every Python that it starts, or stay with it."""
    from hegmctl.running import run as run_job

    return run_job(session)


def complete(session: Session) -> int:
    """What a shell's completion asks for. It is silent about everything that goes wrong: a person is typing."""
    from hegmctl.output import write_lines

    try:
        with session.connect(COMPLETION_TIMEOUT_S) as connection:
            what = session.arguments.required("WHAT")
            if what in ("gpus", "places"):
                write_lines([*[gpu.id for gpu in connection.gpus().gpus], *(["cpu"] if what == "places" else [])])
            else:
                write_lines([str(process.pid) for process in connection.processes().processes])
    except HegmError:
        return 0
    return 0


def hegm_enable(session: Session) -> int:
    """`hegmctl hegm enable`."""
    from hegmctl.enabling import enable

    return enable(session)


def hegm_disable(session: Session) -> int:
    """`hegmctl hegm disable`."""
    from hegmctl.enabling import disable

    return disable(session)


def hegm_status(session: Session) -> int:
    """`hegmctl hegm status`."""
    from hegmctl.enabling import status

    return status(session)


def images_ls(session: Session) -> int:
    """`hegmctl images ls`."""
    from hegmctl.images import ls

    return ls(session)


def images_show(session: Session) -> int:
    """`hegmctl images show`."""
    from hegmctl.images import show

    return show(session)


def images_verify(session: Session) -> int:
    """`hegmctl images verify`."""
    from hegmctl.images import verify

    return verify(session)


def images_rm(session: Session) -> int:
    """`hegmctl images rm`."""
    from hegmctl.images import rm

    return rm(session)


COMMANDS: dict[str, Command] = {
    "gpus": gpus,
    "ps": ps,
    "events": events,
    "doctor": doctor,
    "version": version,
    "config": config,
    "metrics": metrics,
    "ping": ping,
    "simulate hold": simulate_hold,
    "simulate fault": simulate_fault,
    "run": run,
    "migrate": migrate,
    "suspend": suspend,
    "quiesce": quiesce,
    "offload": suspend,
    "handoff": handoff,
    "resume": resume,
    "checkpoint": checkpoint,
    "restore": restore,
    "drain": drain,
    "swap": swap,
    "ops": ops,
    "op": op,
    "cancel": cancel,
    "adopt": adopt,
    "hegm enable": hegm_enable,
    "hegm disable": hegm_disable,
    "hegm status": hegm_status,
    "images ls": images_ls,
    "images show": images_show,
    "images verify": images_verify,
    "images rm": images_rm,
    "__complete": complete,
}

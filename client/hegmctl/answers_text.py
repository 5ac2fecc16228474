"""Text of events, checks, versions, settings, metrics and the simulation's answers."""

from __future__ import annotations

from time import localtime, strftime

from hegmctl.quantities import binary_size, duration
from hegmctl.tables import UNKNOWN, Column, Style, printable, table, wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.answers import DoctorAnswer, PingAnswer, VersionAnswer
    from hegmd.protocol.messages import ConfigReply, FaultReply, HoldReply, MetricsReply, ReloadReply
    from hegmd.protocol.snapshots import Check, Event

_SEVERITIES = {"warning": "yellow", "error": "red"}
_STATUSES = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
_ID_COLUMNS = 24


def event_text(event: Event, style: Style) -> list[str]:
    """Return one event. Its number is a value for `--since`."""
    time = strftime("%Y-%m-%d %H:%M:%S", localtime(event.time_utc))
    severity = style.paint(f"{printable(event.severity):<7}", _SEVERITIES.get(event.severity, ""))
    return [f"{event.seq:>6}  {time}  {severity}  {printable(event.kind):<16}  {printable(event.message)}"]


def check_text(check: Check, style: Style) -> list[str]:
    """Return one line of the doctor, and below a failed check the command that fixes it."""
    status = style.paint(f"{printable(check.status):<4}", _STATUSES.get(check.status, ""))
    lines = [f"{status}  {printable(check.id):<{_ID_COLUMNS}}  {printable(check.summary)}"]
    if check.fix and check.status in ("warn", "fail"):
        lines.append(f"{'':4}  {'':{_ID_COLUMNS}}  fix: {printable(check.fix)}")
    return lines


def doctor_summary(answer: DoctorAnswer, style: Style) -> list[str]:
    parts = [f"{answer.ok} ok", _counted(answer.warn, "warning"), _counted(answer.fail, "failure")]
    if answer.skip:
        parts.append(f"{answer.skip} skipped")
    colour = "red" if answer.fail else "yellow" if answer.warn else "green"
    return ["", style.paint(", ".join(parts), colour)]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def version_text(answer: VersionAnswer, style: Style) -> list[str]:
    spoken = ", ".join(str(version) for version in answer.protocols)
    lines = [f"hegmctl  {printable(answer.version)}, protocol {spoken}"]
    daemon = answer.daemon
    if daemon is None:
        lines.append(f"hegmd    {UNKNOWN}")
        if answer.error is not None and style.remarks:
            lines += ["", *_paragraph(f"{answer.error.message}; {answer.error.hint}", style)]
        return lines
    lines.append(f"hegmd    {printable(daemon.version)}, protocol {daemon.protocol}")
    lines.append(f"node     {printable(daemon.node)}{', its GPUs are simulated' if daemon.simulated else ''}")
    lines.append(f"socket   {printable(answer.socket)}")
    extent = "every process" if daemon.you.may_act_on_all else "your own processes"
    lines.append(f"you      uid {daemon.you.uid}, may act on {extent}")
    if daemon.run:
        lines.append(f"run      {printable(daemon.run)}")
    if daemon.capabilities:
        lines.append(f"offers   {printable(', '.join(daemon.capabilities))}")
    return lines


def _paragraph(text: str, style: Style) -> list[str]:
    return wrapped(printable(text), style.columns) if style.columns else [printable(text)]


def ping_text(answer: PingAnswer, style: Style) -> list[str]:
    times = sorted(answer.round_trips_s)
    who = printable(f"hegmd {answer.version} on {answer.node}")
    if len(times) == 1:
        return [f"{who} answers in {_precise(times[0])}"]
    median = times[len(times) // 2]
    return [
        f"{who}: {len(times)} answers, min {_precise(times[0])}, median {_precise(median)}, max {_precise(times[-1])}"
    ]


def _precise(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 1 else duration(seconds)


def config_text(reply: ConfigReply, style: Style) -> list[str]:
    rows = [[setting.key, _setting_value(setting.value), setting.source] for setting in reply.settings]
    lines = table((Column("SETTING"), Column("VALUE", shrink=10), Column("SOURCE")), rows, style)
    if style.remarks:
        source = f"The file is {printable(reply.path)}." if reply.path else "There is no file; these are the defaults."
        lines += ["", source]
    return lines


def _setting_value(value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return str(list(value)).replace("'", '"')  # pyright: ignore[reportUnknownArgumentType] - printed as it is
    return '""' if value == "" else str(value)


def reload_text(reply: ReloadReply, style: Style) -> list[str]:
    if not reply.changed and not reply.after_restart:
        return ["The configuration was read again; nothing in it has changed."]
    lines = [f"changed: {printable(key)}" for key in reply.changed]
    return lines + [f"changes when the daemon restarts: {printable(key)}" for key in reply.after_restart]


def metrics_text(reply: MetricsReply, style: Style) -> list[str]:
    """Return the metrics unchanged for another program, and escaped for a terminal."""
    lines = reply.text.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    return lines if style.columns is None else [printable(line) for line in lines]


def hold_text(reply: HoldReply, style: Style) -> list[str]:
    """Return the memory that is held from now on."""
    return [f"holding {binary_size(reply.vram_bytes)} on {printable(reply.gpu)} until interrupted"]


def faults_text(reply: FaultReply, style: Style) -> list[str]:
    if not reply.faults:
        return ["There are no faults."]
    return [f"{printable(target)}: {printable(fault)}" for target, fault in reply.faults.items()]

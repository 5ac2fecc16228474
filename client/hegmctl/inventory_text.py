"""GPUs and processes as text: tables that stay readable in a narrow terminal.

Unknown is `-`. Notes below a table tell which vendor's library does not answer and how old its data is, what is wrong
with a GPU, and why something about a process is unknown.
"""

from __future__ import annotations

from hegmctl.quantities import binary_size, duration, used_of_total
from hegmctl.tables import UNKNOWN, Column, Style, printable, shortened, table, wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hegmctl.tables import Cell
    from hegmd.protocol.messages import GpusReply, ProcessesReply
    from hegmd.protocol.snapshots import Gpu, GpuProcess, Health, PeerLink, Vendor, Workload

_COLOURS = {
    "ok": "green",
    "warn": "yellow",
    "unknown": "yellow",
    **dict.fromkeys(("failed", "failing", "gone", "lost"), "red"),
}
_HEALTHY = "healthy"
_LONG_ID = 12
_SIMULATED = "simulated"


def gpus_text(reply: GpusReply, style: Style) -> list[str]:
    if not reply.gpus:
        return _none("There are no GPUs on this node.", reply.vendors, style)
    columns = (
        Column("GPU"),
        Column("NAME", shrink=10),
        Column("MEMORY", right=True),
        Column("UTIL", right=True),
        Column("TEMP", right=True, drop=3),
        Column("POWER", right=True, drop=2),
        Column("MODE", drop=4),
        Column("HEALTH"),
        Column("PCI", drop=5),
    )
    return [*table(columns, [_gpu_row(gpu) for gpu in reply.gpus], style), *_gpu_remarks(reply, style)]


def _gpu_row(gpu: Gpu) -> list[Cell]:
    health = _health_word(gpu)
    return [
        gpu.id,
        gpu.name or UNKNOWN,
        used_of_total(gpu.memory_used_bytes, gpu.memory_total_bytes),
        _with_unit(gpu.utilisation_percent, "%"),
        _with_unit(gpu.temperature_celsius, " C"),
        _power(gpu),
        _mode(gpu),
        (health, _COLOURS.get(health, "")),
        gpu.pci_address or UNKNOWN,
    ]


def _health_word(gpu: Gpu) -> str:
    """Return one word for the GPU's worst problem."""
    if gpu.state != "ok":
        return gpu.state
    return gpu.health.state if gpu.health.condition == _HEALTHY else gpu.health.condition


def _with_unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def _power(gpu: Gpu) -> str:
    if gpu.power_watts is None and gpu.power_limit_watts is None:
        return UNKNOWN
    return f"{_with_unit(gpu.power_watts, '')}/{_with_unit(gpu.power_limit_watts, ' W')}"


def _mode(gpu: Gpu) -> str:
    if gpu.mig is None and gpu.mps is None:
        return UNKNOWN
    return "+".join(name for name, on in (("MIG", gpu.mig), ("MPS", gpu.mps)) if on) or "normal"


def _gpu_remarks(reply: GpusReply, style: Style) -> list[str]:
    if not style.remarks:
        return []
    remarks: list[str] = []
    for gpu in reply.gpus:
        if gpu.state == "lost" and not gpu.health.notes:
            remarks.append(f"{gpu.id}: lost; it fell off the bus and the driver does not reach it")
        remarks += [_remark(gpu, note) for note in gpu.health.notes]
    return below(remarks + _vendor_remarks(reply.vendors), style)


def _remark(gpu: Gpu, note: str) -> str:
    """Return a note; it says so if it makes the GPU failing or gone."""
    return f"{gpu.id} is {gpu.health.condition}: {note}" if note == gpu.health.reason else f"{gpu.id}: {note}"


def _vendor_remarks(vendors: Iterable[Vendor], *, absent: bool = False) -> list[str]:
    """Return notes about the libraries that the data comes from."""
    remarks: list[str] = []
    for vendor in vendors:
        said = "; ".join(part for part in (vendor.message.rstrip(".") or vendor.state, vendor.hint) if part)
        if vendor.state == "stale":
            age = "never read" if vendor.age_s is None else f"{duration(vendor.age_s)} old"
            remarks.append(f"{vendor.vendor} ({age}): {said}")
        elif vendor.state == "failed" or (absent and vendor.state in ("absent", "off")):
            remarks.append(f"{vendor.vendor}: {said}")
        elif vendor.vendor == _SIMULATED and vendor.state == "ok":
            remarks.append("These GPUs are simulated.")
    return remarks


def below(remarks: Sequence[str], style: Style) -> list[str]:
    lines: list[str] = []
    for remark in remarks:
        text = printable(remark)
        lines += wrapped(text, style.columns) if style.columns else [text]
    return ["", *lines] if lines else []


def _none(sentence: str, vendors: Iterable[Vendor], style: Style) -> list[str]:
    remarks = _vendor_remarks(vendors, absent=True) if style.remarks else []
    return [sentence, *[printable(remark) for remark in remarks]]


def gpus_in_full(reply: GpusReply, style: Style) -> list[str]:
    """Return all that is known of each GPU, for `hegmctl gpus --long`."""
    if not reply.gpus:
        return _none("There are no GPUs on this node.", reply.vendors, style)
    ids = {gpu.uuid: gpu.id for gpu in reply.gpus}
    lines: list[str] = []
    for gpu in reply.gpus:
        lines.append(style.paint(printable(f"{gpu.id}  {gpu.name or UNKNOWN}"), "bold"))
        lines += [f"  {label:<16}{printable(value)}" for label, value in _gpu_facts(gpu, ids)]
        lines.append("")
    return [*lines[:-1], *_gpu_remarks(reply, style)]


def _gpu_facts(gpu: Gpu, ids: dict[str, str]) -> list[tuple[str, str]]:
    switch = {True: "on", False: "off", None: UNKNOWN}
    counts = (
        (gpu.health.ecc_corrected, "corrected"),
        (gpu.health.ecc_uncorrected, "uncorrected"),
        (gpu.health.retired_pages, "pages or rows retired"),
    )
    facts = [
        ("state", gpu.state),
        ("UUID", gpu.uuid),
        ("PCI address", gpu.pci_address or UNKNOWN),
        ("vendor", gpu.vendor),
        ("chip", gpu.chip or UNKNOWN),
        ("driver", gpu.driver_version or UNKNOWN),
        ("index", str(gpu.index)),
        ("NUMA node", UNKNOWN if gpu.numa_node is None else str(gpu.numa_node)),
        ("memory", used_of_total(gpu.memory_used_bytes, gpu.memory_total_bytes)),
        ("memory free", UNKNOWN if gpu.memory_free_bytes is None else binary_size(gpu.memory_free_bytes)),
        ("utilisation", _with_unit(gpu.utilisation_percent, "%")),
        ("temperature", _with_unit(gpu.temperature_celsius, " C")),
        ("power", _power(gpu)),
        ("MIG", switch[gpu.mig]),
        ("MPS", switch[gpu.mps]),
        ("persistence", switch[gpu.persistence]),
        ("health", gpu.health.state),
        ("condition", _condition(gpu.health)),
        ("memory errors", ", ".join(f"{UNKNOWN if count is None else count} {what}" for count, what in counts)),
        ("last XID", _last_xid(gpu.health)),
    ]
    links = [("links", _link(link, ids)) for link in gpu.links] or [("links", UNKNOWN)]
    return facts + links[:1] + [("", value) for _label, value in links[1:]]


def _condition(health: Health) -> str:
    return health.condition if health.reason is None else f"{health.condition}: {health.reason}"


def _last_xid(health: Health) -> str:
    if health.last_xid is None:
        return UNKNOWN
    count = health.xid_count
    return f"{health.last_xid}, the last of {count}" if count is not None and count > 1 else str(health.last_xid)


def _link(link: PeerLink, ids: dict[str, str]) -> str:
    lanes = "" if link.lanes is None else f" x{link.lanes}"
    speed = "" if link.bytes_per_s is None else f", {link.bytes_per_s / 1e9:.0f} GB/s"
    return f"{ids.get(link.to_uuid, link.to_uuid)} by {link.kind}{lanes}{speed}"


def processes_text(reply: ProcessesReply, style: Style, on_gpus: Sequence[str] = ()) -> list[str]:
    """Return the table of `hegmctl ps`. `on_gpus` are the requested GPUs, if not all."""
    if not reply.processes:
        return _none(_nobody(on_gpus), reply.vendors, style)
    held = any(process.held_bytes for process in reply.processes)
    of_jobs = any(process.job for process in reply.processes)
    columns = [
        Column("PID", right=True),
        *([Column("JOB")] if of_jobs else []),
        Column("USER", shrink=8),
        Column("GPU", shrink=6),
        Column("VRAM", right=True),
        *([Column("HELD", right=True, drop=1)] if held else []),
        Column("AGENT", drop=3),
        Column("WORKLOAD", shrink=14, drop=4),
        Column("COMMAND", shrink=16),
    ]
    rows = [_process_row(process, held=held, of_jobs=of_jobs) for process in reply.processes]
    return [*table(columns, rows, style), *_process_remarks(reply, style)]


def _nobody(on_gpus: Sequence[str]) -> str:
    return f"No such process is on {' or '.join(on_gpus)}." if on_gpus else "No process is on a GPU here."


def _process_row(process: GpuProcess, *, held: bool, of_jobs: bool) -> list[Cell]:
    return [
        str(process.pid),
        *([process.job or UNKNOWN] if of_jobs else []),
        _owner(process),
        _on_gpus(process),
        _vram(process),
        *([binary_size(process.held_bytes)] if held else []),
        "yes" if process.agent else "no",
        UNKNOWN if process.workload is None else workload_text(process.workload),
        _command(process),
    ]


def _owner(process: GpuProcess) -> str:
    if process.user is not None:
        return process.user
    return UNKNOWN if process.uid is None else str(process.uid)


def _command(process: GpuProcess) -> str:
    if process.command:
        return process.command
    return f"[{process.name}]" if process.name else UNKNOWN


def _on_gpus(process: GpuProcess) -> str:
    """Return the ids of its GPUs; `cpu` for a process that trains on none."""
    if not process.gpus and process.agent is not None and process.agent.on_cpu:
        return "cpu"
    return gpus_as_text([use.gpu for use in process.gpus])


def gpus_as_text(gpus: Iterable[str]) -> str:
    """Join ids of GPUs, with ranges: `gpu0-3,5`."""
    names = list(dict.fromkeys(gpus))
    numbers = sorted(int(name[3:]) for name in names if name.startswith("gpu") and name[3:].isdigit())
    if len(numbers) != len(names) or not numbers:
        return ",".join(names) or UNKNOWN
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "gpu" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _vram(process: GpuProcess) -> str:
    """Return its memory on all GPUs; if one of them is unknown, the minimum."""
    known = [use.vram_bytes for use in process.gpus if use.vram_bytes is not None]
    if not known:
        return UNKNOWN
    return ("" if len(known) == len(process.gpus) else ">") + binary_size(sum(known))


def workload_text(workload: Workload) -> str:
    """Return what the process belongs to, such as `slurm:1234`. A container's id is cut as container tools do."""
    is_long_id = workload.kind == "container" and len(workload.id) == 64
    return f"{workload.kind}:{workload.id[:_LONG_ID] if is_long_id else workload.id}"


def _process_remarks(reply: ProcessesReply, style: Style) -> list[str]:
    if not style.remarks:
        return []
    by_note: dict[str, list[str]] = {}
    for process in reply.processes:
        if process.note:
            by_note.setdefault(process.note, []).append(str(process.pid))
    for process in reply.processes:
        if process.agent is not None and process.agent.image_missed:
            by_note.setdefault(process.agent.image_missed, []).append(str(process.pid))
    notes = [f"{', '.join(pids)}: {note}" for note, pids in by_note.items()]
    return below(notes + _vendor_remarks(reply.vendors), style)


def ways_text(reply: ProcessesReply, style: Style, on_gpus: Sequence[str] = ()) -> list[str]:
    """Return the possible methods of moving each process, for `hegmctl ps --ways`."""
    if not reply.processes:
        return _none(_nobody(on_gpus), reply.vendors, style)
    lines: list[str] = []
    for process in reply.processes:
        shares = ", ".join(
            f"{use.gpu} {UNKNOWN if use.vram_bytes is None else binary_size(use.vram_bytes)}" for use in process.gpus
        )
        head = printable(f"{process.pid}  {_owner(process)}  {shares}  {_command(process)}")
        head = shortened(head, style.columns, style.ellipsis) if style.columns else head
        lines.append(style.paint(head, "bold"))
        for way in process.ways:
            answer = style.paint("yes", "green") if way.possible else style.paint("no ", "yellow")
            reason = printable(way.reason)
            indent = " " * 16
            told = wrapped(reason, style.columns, indent) if style.columns else [indent + reason]
            lines += [f"  {printable(way.way):<9}{answer}  {told[0][16:]}", *told[1:]]
        if not process.ways:
            lines.append("  the daemon reports no method of moving it")
        lines.append("")
    return [*lines[:-1], *_process_remarks(reply, style)]

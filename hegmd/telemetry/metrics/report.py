"""Every metric of hegmd: its name, its meaning, and its source.

Pure: a snapshot of the node and the daemon's counts give a text. Values of a library that no longer answers are old and
left out, although `hegmctl gpus` shows them with their age: a graph would show them as current. All names begin with
hegmd_, those of the process too, since node_exporter has `process_` names and refuses a textfile that repeats one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from hegmd.protocol.snapshots import FAILING, GONE, HEALTHY, Gpu, GpuProcess, Vendor
from hegmd.telemetry.metrics.counters import Counters
from hegmd.telemetry.metrics.exposition import CONTENT_TYPE, Exposition, Family, Labels
from hegmd.telemetry.metrics.own_process import OwnProcess

__all__ = ["CONTENT_TYPE", "OPERATION_STATES", "Build", "JobTally", "Snapshot", "Tallies", "render"]

HEALTH_STATES = ("ok", "warn", "failed", "unknown")
CONDITIONS = (HEALTHY, FAILING, GONE)
# The states of running operations. One that needs an administrator counts as waiting only.
OPERATION_STATES = ("moving", "quiesced", "suspended", "waiting")
# The states of jobs that are to be recovered, and of states that are kept.
RECOVERY_STATES = ("starting", "protected", "unprotected", "recovering", "kept", "awaited", "lost")
VENDOR_STATES = ("ok", "absent", "off", "stale", "failed")


class Snapshot(Protocol):
    """The node at one moment."""

    @property
    def taken_utc(self) -> float: ...
    @property
    def gpus(self) -> Sequence[Gpu]: ...
    @property
    def processes(self) -> Sequence[GpuProcess]: ...
    @property
    def vendors(self) -> Sequence[Vendor]: ...


class Build(NamedTuple):
    """The version of hegmd."""

    version: str
    protocol_version: int
    python_version: str


class JobTally(NamedTuple):
    """The counts of one job."""

    id: str
    name: str
    is_training: bool
    boundary: int | None


_NONE: Mapping[Any, int] = MappingProxyType({})


class RecoveryTally(NamedTuple):
    """The number of jobs of `hegmctl run --recover` in each state, and of snapshots taken."""

    states: Mapping[str, int]
    snapshots: int = 0


class Tallies(NamedTuple):
    """Counts that other parts keep."""

    events: Mapping[str, int] = _NONE
    log_dropped: int = 0
    log_held_back: int = 0
    audit_lost: int = 0
    pool_bytes: Mapping[str, int] = _NONE
    orphans: int = 0
    images_missed: int = 0
    operations: Mapping[tuple[str, str, str], int] = _NONE
    #: Running operations by state: OPERATION_STATES.
    operations_now: Mapping[str, int] = _NONE
    jobs: Sequence[JobTally] = ()
    #: Jobs and leases that share GPUs, by state.
    sharing: Mapping[str, int] = _NONE
    recovery: RecoveryTally = RecoveryTally(_NONE)


# A changing value of a GPU: name, kind, meaning, and how to read it.
_GPU_VALUES: tuple[tuple[str, str, str, Callable[[Gpu], float | None]], ...] = (
    (
        "memory_used_bytes",
        "gauge",
        "GPU memory in use by processes and the driver, without the driver's fixed reserve.",
        lambda gpu: gpu.memory_used_bytes,
    ),
    ("memory_free_bytes", "gauge", "GPU memory that can still be taken.", lambda gpu: gpu.memory_free_bytes),
    (
        "utilisation_ratio",
        "gauge",
        "Share of the last sample in which a kernel ran, from 0 to 1.",
        lambda gpu: None if gpu.utilisation_percent is None else gpu.utilisation_percent / 100,
    ),
    ("temperature_celsius", "gauge", "Core temperature.", lambda gpu: gpu.temperature_celsius),
    ("power_watts", "gauge", "Power drawn now.", lambda gpu: gpu.power_watts),
    ("power_limit_watts", "gauge", "Power limit in force.", lambda gpu: gpu.power_limit_watts),
    ("mig_enabled", "gauge", "Whether MIG is enabled.", lambda gpu: gpu.mig),
    ("mps_enabled", "gauge", "Whether processes share it through MPS.", lambda gpu: gpu.mps),
    ("persistence_enabled", "gauge", "Whether the driver stays loaded without processes.", lambda gpu: gpu.persistence),
    (
        "retired_pages",
        "gauge",
        "Memory pages or rows that were retired permanently.",
        lambda gpu: gpu.health.retired_pages,
    ),
    (
        "last_xid",
        "gauge",
        "The newest XID error that the driver reported since the daemon started.",
        lambda gpu: gpu.health.last_xid,
    ),
)


def render(
    snapshot: Snapshot | None, counters: Counters, *, build: Build, own: OwnProcess, tallies: Tallies | None = None
) -> str:
    """Return the whole text; without a snapshot, what is known before the first one."""
    out = Exposition()
    if snapshot is not None:
        _vendors(out, snapshot.vendors)
        answering = {vendor.vendor for vendor in snapshot.vendors if vendor.state == "ok"}
        _gpus(out, snapshot, answering)
        taken = out.family("hegmd_inventory_timestamp_seconds", "gauge", "Time of the last snapshot of the node.")
        taken.add(snapshot.taken_utc)
    _inventory(out, counters)
    _server(out, counters)
    _kept(out, tallies or Tallies())
    _daemon(out, build, own)
    return out.text()


def _vendors(out: Exposition, vendors: Sequence[Vendor]) -> None:
    state = out.family("hegmd_vendor_state", "gauge", "State of a vendor's library: 1 for the current state.")
    age = out.family("hegmd_vendor_age_seconds", "gauge", "Age of the last answer of the vendor's library.")
    for vendor in vendors:
        for name in VENDOR_STATES:
            state.add(vendor.state == name, {"vendor": vendor.vendor, "state": name})
        age.add(vendor.age_s, {"vendor": vendor.vendor})


def _gpus(out: Exposition, snapshot: Snapshot, answering: set[str]) -> None:
    labels = {gpu.id: _gpu_labels(gpu) for gpu in snapshot.gpus}
    answers = [gpu for gpu in snapshot.gpus if gpu.state == "ok" and gpu.vendor in answering]
    info = out.family("hegmd_gpu_info", "gauge", "Constant properties of a GPU; always 1.")
    up = out.family("hegmd_gpu_up", "gauge", "Whether the GPU answers: 0 when it is lost or its library hangs.")
    total = out.family("hegmd_gpu_memory_total_bytes", "gauge", "GPU memory.")
    health = out.family("hegmd_gpu_health", "gauge", "Health of the GPU: 1 for the current state.")
    condition = out.family("hegmd_gpu_condition", "gauge", "Whether the GPU can run jobs: 1 for its condition.")
    for gpu in snapshot.gpus:
        fixed = {"pci_address": gpu.pci_address, "chip": gpu.chip, "driver_version": gpu.driver_version}
        info.add(1, {**labels[gpu.id], **{name: value for name, value in fixed.items() if value is not None}})
        up.add(gpu in answers, labels[gpu.id])
        total.add(gpu.memory_total_bytes, labels[gpu.id])
        for name in CONDITIONS:
            condition.add(gpu.health.condition == name, {**labels[gpu.id], "condition": name})
    for gpu in answers:
        for name in HEALTH_STATES:
            health.add(gpu.health.state == name, {**labels[gpu.id], "state": name})
    for name, kind, meaning, value in _GPU_VALUES:
        family = out.family(f"hegmd_gpu_{name}", kind, meaning)
        for gpu in answers:
            family.add(value(gpu), labels[gpu.id])
    _ecc(out, answers, labels)
    _processes(out, snapshot.processes, answers, labels)


def _gpu_labels(gpu: Gpu) -> Labels:
    return {"gpu": gpu.id, "uuid": gpu.uuid, "vendor": gpu.vendor, **({"name": gpu.name} if gpu.name else {})}


def _ecc(out: Exposition, gpus: Sequence[Gpu], labels: Mapping[str, Labels]) -> None:
    family = out.family("hegmd_gpu_ecc_errors_total", "counter", "Memory errors since the driver was loaded.")
    for gpu in gpus:
        family.add(gpu.health.ecc_corrected, {**labels[gpu.id], "kind": "corrected"})
        family.add(gpu.health.ecc_uncorrected, {**labels[gpu.id], "kind": "uncorrected"})


def _processes(
    out: Exposition, processes: Sequence[GpuProcess], gpus: Sequence[Gpu], labels: Mapping[str, Labels]
) -> None:
    on_gpu: Counter[str] = Counter()
    vram_bytes: Counter[str] = Counter()
    untold: set[str] = set()
    for process in processes:
        on_gpu.update({use.gpu for use in process.gpus})
        for use in process.gpus:
            if use.vram_bytes is None:
                untold.add(use.gpu)
            else:
                vram_bytes[use.gpu] += use.vram_bytes
    count = out.family("hegmd_gpu_processes", "gauge", "Processes that use the GPU.")
    memory = out.family(
        "hegmd_gpu_processes_memory_bytes", "gauge", "GPU memory of all processes; only if known for each."
    )
    for gpu in gpus:
        count.add(on_gpu[gpu.id], labels[gpu.id])
        memory.add(None if gpu.id in untold else vram_bytes[gpu.id], labels[gpu.id])
    held = out.family("hegmd_held_bytes", "gauge", "Memory that the daemon holds for processes.")
    held.add(sum(process.held_bytes for process in processes))
    agents = out.family("hegmd_agents", "gauge", "Processes on GPUs whose agent is connected.")
    agents.add(sum(process.agent is not None for process in processes))


def _inventory(out: Exposition, counters: Counters) -> None:
    took = out.family("hegmd_inventory_refresh_duration_seconds", "histogram", "Duration of a snapshot of the node.")
    took.add_histogram(counters.refreshes, {})
    failures = out.family("hegmd_vendor_failures_total", "counter", "Errors and timeouts of a vendor's library.")
    _by_word(failures, "vendor", counters.vendor_failures)


def _server(out: Exposition, counters: Counters) -> None:
    requests = out.family(
        "hegmd_requests_total", "counter", "Requests answered; result is ok or the code of the error."
    )
    for (op, result), count in sorted(counters.requests.items()):
        requests.add(count, {"op": op, "result": result})
    durations = out.family("hegmd_request_duration_seconds", "histogram", "Time from a request to its answer.")
    for op, histogram in sorted(counters.durations.items()):
        durations.add_histogram(histogram, {"op": op})
    out.family("hegmd_connections", "gauge", "Connections now.").add(counters.connections)
    out.family("hegmd_connections_total", "counter", "Connections accepted.").add(counters.connections_total)
    refused = out.family("hegmd_connections_refused_total", "counter", "Connections refused, by error code.")
    _by_word(refused, "code", counters.refusals)
    dropped = out.family(
        "hegmd_connections_dropped_total", "counter", "Connections closed by the daemon, by error code."
    )
    _by_word(dropped, "code", counters.drops)
    out.family("hegmd_bad_frames_total", "counter", "Frames that are not a valid message.").add(counters.bad_frames)
    out.family("hegmd_received_bytes_total", "counter", "Bytes received at the socket.").add(counters.received_bytes)
    out.family("hegmd_sent_bytes_total", "counter", "Bytes sent at the socket.").add(counters.sent_bytes)


def _kept(out: Exposition, tallies: Tallies) -> None:
    events = out.family("hegmd_events_total", "counter", "Events recorded, by kind.")
    _by_word(events, "kind", tallies.events)
    dropped = out.family(
        "hegmd_log_records_dropped_total", "counter", "Log records lost because the reader was blocked."
    )
    dropped.add(tallies.log_dropped)
    held_back = out.family(
        "hegmd_log_records_held_back_total", "counter", "Repeated log records that were counted but not written."
    )
    held_back.add(tallies.log_held_back)
    ended = out.family("hegmd_operations_total", "counter", "Finished operations, by kind, method and result.")
    for (kind, way, end), count in sorted(tallies.operations.items()):
        ended.add(count, {"kind": kind, "way": way, "end": end})
    now = out.family("hegmd_operations", "gauge", "Operations that have not ended, by state; waiting: for a person.")
    for state in OPERATION_STATES:
        now.add(tallies.operations_now.get(state, 0), {"state": state})
    _jobs(out, tallies.jobs)
    shared = out.family(
        "hegmd_sharing", "gauge", "Jobs that wait for a GPU, jobs that are suspended for others, and leases by state."
    )
    _by_word(shared, "what", tallies.sharing)
    _recovery(out, tallies.recovery)
    lost = out.family("hegmd_audit_records_lost_total", "counter", "Audit records that are in the log only.")
    lost.add(tallies.audit_lost)
    pool = out.family(
        "hegmd_pool_bytes", "gauge", "Bytes of the pool: in memory, on disk, budget, ready for a suspend, pinned."
    )
    _by_word(pool, "what", tallies.pool_bytes)
    orphans = out.family(
        "hegmd_orphans", "gauge", "Bytes and processes that belong to no operation and need an administrator."
    )
    orphans.add(tallies.orphans)
    missed = out.family("hegmd_images_missed", "gauge", "Jobs whose last scheduled image was not written.")
    missed.add(tallies.images_missed)


def _recovery(out: Exposition, tally: RecoveryTally) -> None:
    states = out.family("hegmd_recovery_jobs", "gauge", "Jobs of `hegmctl run --recover` by state.")
    for state in RECOVERY_STATES:
        states.add(tally.states.get(state, 0), {"state": state})
    taken = out.family("hegmd_recovery_snapshots_total", "counter", "Snapshots of jobs since the daemon started.")
    taken.add(tally.snapshots)


def _jobs(out: Exposition, jobs: Sequence[JobTally]) -> None:
    trains = out.family("hegmd_job_trains", "gauge", "Whether a job trains; one series for each that has not ended.")
    passed = out.family(
        "hegmd_job_boundaries_total", "counter", "Batch boundaries that a job has passed, by its slowest rank."
    )
    for job in jobs:
        labels = {"id": job.id, "name": job.name}
        trains.add(job.is_training, labels)
        passed.add(job.boundary, labels)


def _daemon(out: Exposition, build: Build, own: OwnProcess) -> None:
    out.family("hegmd_build_info", "gauge", "Version of hegmd; always 1.").add(
        1,
        {
            "version": build.version,
            "protocol_version": str(build.protocol_version),
            "python_version": build.python_version,
        },
    )
    process = "hegmd_process_"
    out.family(f"{process}start_time_seconds", "gauge", "When the daemon was started.").add(own.started_utc)
    out.family(f"{process}cpu_seconds_total", "counter", "CPU time of the daemon.").add(own.cpu_s)
    out.family(f"{process}resident_memory_bytes", "gauge", "Resident memory of the daemon.").add(own.resident_bytes)
    out.family(f"{process}threads", "gauge", "Threads of the daemon.").add(own.threads)
    out.family(f"{process}open_fds", "gauge", "Open descriptors of the daemon.").add(own.open_fds)
    out.family(f"{process}max_fds", "gauge", "Limit of open descriptors of the daemon.").add(own.max_fds)


def _by_word(family: Family, label: str, counts: Mapping[str, int]) -> None:
    for word, count in sorted(counts.items()):
        family.add(count, {label: word})

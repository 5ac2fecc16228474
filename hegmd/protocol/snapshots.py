"""The daemon's view of its node, as frozen records: GPUs, processes, vendor libraries, checks and events.

The providers, the inventory and the wire use the same records. Unknown is None and never 0: a GPU that fell off the bus
has unknown memory use, not 0 bytes in use.
"""

from __future__ import annotations

from .record import Record, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class PeerLink(Record):
    """A link between two GPUs that bypasses host memory."""

    to_uuid: str = field("UUID of the GPU at the other end")
    kind: str = field("nvlink, xgmi, pcie or simulated")
    lanes: int | None = field("number of parallel links", default=None)
    bytes_per_s: int | None = field("nominal bandwidth in one direction", default=None)


# Whether a job is to be on that GPU.
HEALTHY, FAILING, GONE = "healthy", "failing", "gone"
# Why not: words of the setting `evacuate.on` too.
UNCORRECTED, CORRECTED, ROWS, LINK, DRIVER, LOST = "uncorrected", "corrected", "rows", "link", "driver", "lost"


class Health(Record):
    """Whether a GPU can be trusted with a job."""

    state: str = field("ok, warn, failed or unknown")
    notes: tuple[str, ...] = field("the problems, one sentence each", default=())
    ecc_corrected: int | None = field("corrected memory errors since the driver was loaded", default=None)
    ecc_uncorrected: int | None = field("uncorrected memory errors since the driver was loaded", default=None)
    retired_pages: int | None = field("retired memory pages or rows", default=None)
    last_xid: int | None = field("latest XID error since hegmd started", default=None)
    xid_count: int | None = field("number of XID errors since then", default=None)
    condition: str = field("healthy; failing: no job is placed on it; gone: no job can continue there", default=HEALTHY)
    causes: tuple[str, ...] = field(
        "worst first: uncorrected, corrected (memory errors), rows (to replace), link, driver, lost", default=()
    )
    reason: str | None = field("the note that explains a bad condition", default=None)


class Gpu(Record):
    """One GPU at one moment."""

    id: str = field("name in commands, such as gpu0; constant while the daemon runs")
    index: int = field("the vendor library's index")
    uuid: str = field("the vendor's UUID of the card, or of a MIG slice's parent")
    pci_address: str | None = field("domain:bus:device.function", default=None)
    name: str | None = field("the product's name", default=None)
    vendor: str = field("nvidia, amd or simulated")
    chip: str | None = field("identity of the chip; images need an equal one", default=None)
    state: str = field("ok; lost: it fell off the bus; unknown: the vendor's library does not answer", default="ok")
    memory_total_bytes: int | None = field("video memory", default=None)
    memory_used_bytes: int | None = field("as nvidia-smi shows it, without the driver's fixed reserve", default=None)
    memory_free_bytes: int | None = field(
        "memory that can be allocated, without the driver's fixed reserve", default=None
    )
    utilisation_percent: float | None = field("share of the last sample period with a running kernel", default=None)
    temperature_celsius: float | None = field("core temperature", default=None)
    power_watts: float | None = field("current power draw", default=None)
    power_limit_watts: float | None = field("power limit", default=None)
    numa_node: int | None = field("nearest NUMA node of the host", default=None)
    links: tuple[PeerLink, ...] = field("links to other GPUs of the node", default=())
    mig: bool | None = field("MIG mode is on", default=None)
    mps: bool | None = field("processes share it through MPS", default=None)
    persistence: bool | None = field("the driver stays loaded while no process uses it", default=None)
    driver_version: str | None = field("version of the kernel driver", default=None)
    health: Health = field("errors and other reasons for distrust", default=Health(state="unknown"))
    plays: str | None = field("nvidia or amd, if a simulated GPU imitates one", default=None)


class Vendor(Record):
    """The state of one vendor's library, and so how current the data of its GPUs is."""

    vendor: str = field("nvidia, amd or simulated")
    state: str = field(
        "ok; absent: no library or GPU; off: by configuration; stale: it does not "
        "answer; failed: it answers with an error"
    )
    message: str = field("the state in one sentence", default="")
    hint: str = field("the next step", default="")
    driver_version: str | None = field("version of the kernel driver", default=None)
    library_version: str | None = field("version of the management library", default=None)
    compute_version: str | None = field("highest CUDA or ROCm version of the driver", default=None)
    age_s: float | None = field("age of the data", default=None)


class GpuUse(Record):
    """The memory of one process on one GPU."""

    gpu: str = field("id of the GPU, such as gpu0")
    vram_bytes: int | None = field("its GPU memory there", default=None)
    kind: str = field("compute, graphics or mps", default="compute")


class Workload(Record):
    """The unit, container or job of a process, from its control group."""

    kind: str = field("kubernetes, slurm, container or systemd")
    id: str = field("pod UID, Slurm job, container id or unit name")
    detail: Mapping[str, str] = field("container, step and slice, if known", default={})


class AgentInfo(Record):
    """The agent in a worker, while it is connected."""

    name: str = field("the program's name for itself")
    version: str = field("its version")
    framework: str | None = field("training framework, such as torch", default=None)
    framework_version: str | None = field("version of the framework", default=None)
    job: str | None = field("name of its `hegmctl run`", default=None)
    run: str | None = field("id of its `hegmctl run`, whose processes migrate together", default=None)
    rank: int | None = field("rank in a distributed job", default=None)
    boundary: int | None = field("batch boundaries passed at its last report", default=None)
    parked: bool = field("its training thread is parked at a boundary", default=False)
    held_bytes: int = field("bytes of its offloaded storages", default=0)
    supervised: bool = field("a `hegmctl run --allow-restart` can restart it", default=False)
    kept: bool = field("a prestarted process can continue from its state", default=False)
    image_missed: str | None = field("why its last scheduled image was not made", default=None)
    on_cpu: bool = field("it reports that it trains without a GPU", default=False)
    unknown: tuple[str, ...] | None = field(
        "after `hegmctl attach`: unknown facts that prevent restarts but not migrations", default=None
    )


class Way(Record):
    """One method of moving a process, and whether it is possible."""

    way: str = field("driver, agent, criu or restart")
    possible: bool = field("the node and the process allow it now")
    reason: str = field("why it is possible or not")


class GpuProcess(Record):
    """One process that uses at least one GPU. The pid and the start time together identify it."""

    pid: int = field("process id, in the driver's pid namespace")
    start_ticks: int | None = field("start time in clock ticks since boot", default=None)
    started_utc: float | None = field("start time", default=None)
    uid: int | None = field("owner", default=None)
    user: str | None = field("owner's name", default=None)
    name: str | None = field("short name of the program", default=None)
    command: str | None = field("command line, if the caller may see it", default=None)
    job: str | None = field("id of its job", default=None)
    workload: Workload | None = field("its container, pod, Slurm job or unit", default=None)
    gpus: tuple[GpuUse, ...] = field("its use of each GPU")
    held_bytes: int = field("bytes of the process that hegmd holds", default=0)
    agent: AgentInfo | None = field("its agent, if connected", default=None)
    ways: tuple[Way, ...] = field("the methods of moving it", default=())
    note: str | None = field(
        "why something is unknown, that a signal has stopped it, or that its launcher has ended", default=None
    )


class Check(Record):
    """One line of `hegmctl doctor`."""

    id: str = field("stable name of the check, such as nvidia.driver")
    status: str = field("ok, warn, fail, or skip if not applicable")
    summary: str = field("what was found")
    fix: str | None = field("the command or step that fixes it", default=None)


# All kinds of events, by family. A family can be requested as a whole.
EVENT_KINDS: Mapping[str, tuple[str, ...]] = {
    "config": ("config.reloaded",),
    "events": ("events.missed",),
    "gpu": ("gpu.back", "gpu.evacuated", "gpu.found", "gpu.health", "gpu.lost", "gpu.mode"),
    "inventory": ("inventory.fresh", "inventory.ready", "inventory.stale"),
    "job": (
        *("job.fell", "job.given-up", "job.gpu-gone", "job.hung", "job.launcher-ended"),
        *("job.protected", "job.recovered", "job.unprotected"),
    ),
    "operation": (
        *("operation.began", "operation.done", "operation.found", "operation.held", "operation.holding"),
        "operation.image-missed",
        *("operation.journal-failed", "operation.journal-mended", "operation.lost", "operation.recovered"),
        *("operation.suspended", "operation.swap-interrupted", "operation.rolling-back", "operation.rolled-back"),
    ),
    "pool": ("pool.damaged", "pool.dropped", "pool.spill-failed", "pool.spilled", "pool.orphan"),
    "process": ("process.ended", "process.next-fell", "process.started"),
    "sharing": (
        *("sharing.failed", "sharing.lease-dropped", "sharing.lease-ended", "sharing.lease-held"),
        *("sharing.lease-requested", "sharing.moved", "sharing.placed", "sharing.priority", "sharing.queued"),
        *("sharing.resumed", "sharing.suspended"),
    ),
    "vendor": ("vendor.failed", "vendor.recovered"),
}


class Event(Record):
    """An event on the node, in the order in which the daemon noticed it."""

    seq: int = field("counts from 1 in each `run` of the daemon")
    time_utc: float = field("time of the event")
    kind: str = field("stable name, such as gpu.lost or process.started")
    severity: str = field("info, warning or error")
    message: str = field("one sentence")
    gpu: str | None = field("the GPU concerned", default=None)
    pid: int | None = field("the process concerned", default=None)
    facts: Mapping[str, object] = field("plain values for programs", default={})

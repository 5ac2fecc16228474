"""What the daemon knows of its node, as frozen records: GPUs, processes, vendors' libraries, checks, events.

The same records travel from the providers through the inventory to the wire, so that a thing has one description.
Unknown is None and never 0: a GPU that fell off the bus has no used memory, not none in use.
"""

from __future__ import annotations

from .record import Record, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class PeerLink(Record):
    """A way from one GPU to another on which bytes can go without passing through host memory."""

    to_uuid: str = field("UUID of the GPU at the other end")
    kind: str = field("nvlink, xgmi, pcie or simulated")
    lanes: int | None = field("how many links run in parallel", default=None)
    bytes_per_s: int | None = field("what they carry together in one direction, by the vendor's word", default=None)


# Whether a job is to be on that GPU.
HEALTHY, FAILING, GONE = "healthy", "failing", "gone"
# Why not: words of the setting `evacuate.on` too.
UNCORRECTED, CORRECTED, ROWS, LINK, DRIVER, LOST = "uncorrected", "corrected", "rows", "link", "driver", "lost"


class Health(Record):
    """What speaks for or against trusting a GPU with a job."""

    state: str = field("ok, warn, failed, or unknown when the driver does not say")
    notes: tuple[str, ...] = field("one sentence for each thing that is not as it should be", default=())
    ecc_corrected: int | None = field("corrected memory errors since the driver was loaded", default=None)
    ecc_uncorrected: int | None = field("uncorrected memory errors since the driver was loaded", default=None)
    retired_pages: int | None = field("retired memory pages or rows", default=None)
    last_xid: int | None = field("the newest XID error that the driver reported since hegmd watches", default=None)
    xid_count: int | None = field("how many it reported since then; None before the first one", default=None)
    condition: str = field(
        "healthy; failing: it works, and is no place for a job any more; or gone: no job can go on there",
        default=HEALTHY,
    )
    causes: tuple[str, ...] = field(
        "of a GPU that is failing or gone, the worst first: uncorrected or corrected (memory errors), rows (of memory "
        "that have to be replaced), link, driver, lost",
        default=(),
    )
    reason: str | None = field("of such a GPU: the note that says why", default=None)


class Gpu(Record):
    """One GPU, whole, as it was at one moment."""

    id: str = field("what to call it in commands, such as gpu0; keeps its meaning while the daemon runs")
    index: int = field("the vendor library's own index")
    uuid: str = field("the vendor's UUID; the identity of the card (or of the MIG slice's parent)")
    pci_address: str | None = field("domain:bus:device.function", default=None)
    name: str | None = field("the product's name", default=None)
    vendor: str = field("nvidia, amd or simulated")
    chip: str | None = field(
        "an identity of the chip: a process image can only go to a GPU with an equal one", default=None
    )
    state: str = field("ok; lost: it fell off the bus; unknown: the vendor's library does not answer", default="ok")
    memory_total_bytes: int | None = field("video memory", default=None)
    memory_used_bytes: int | None = field(
        "in use by processes and the driver, without the driver's fixed reserve, as nvidia-smi shows it", default=None
    )
    memory_free_bytes: int | None = field(
        "video memory that can still be taken; less than total minus used by what the driver keeps for itself",
        default=None,
    )
    utilisation_percent: float | None = field("share of the last sample in which a kernel ran", default=None)
    temperature_celsius: float | None = field("core temperature", default=None)
    power_watts: float | None = field("power drawn now", default=None)
    power_limit_watts: float | None = field("power limit in force", default=None)
    numa_node: int | None = field("the NUMA node of the host that is nearest", default=None)
    links: tuple[PeerLink, ...] = field("ways to the other GPUs of the node", default=())
    mig: bool | None = field("whether it is cut into MIG instances", default=None)
    mps: bool | None = field("whether processes share it through MPS", default=None)
    persistence: bool | None = field("whether the driver stays loaded with no process on it", default=None)
    driver_version: str | None = field("version of the kernel driver", default=None)
    health: Health = field("errors and other reasons for doubt", default=Health(state="unknown"))
    plays: str | None = field(
        "of a simulated GPU: the vendor by whose variables processes find it, nvidia or amd; nil for neither",
        default=None,
    )


class Vendor(Record):
    """How one vendor's library does, and therefore how far what is said of its GPUs can be trusted."""

    vendor: str = field("nvidia, amd or simulated")
    state: str = field(
        "ok; absent: no library or no such GPU here; off: by configuration; "
        "stale: the library does not answer and what is shown is old; failed: it answers with an error"
    )
    message: str = field("one sentence on that state", default="")
    hint: str = field("what to do about it; empty when there is nothing to do", default="")
    driver_version: str | None = field("version of the kernel driver", default=None)
    library_version: str | None = field("version of the management library", default=None)
    compute_version: str | None = field("highest CUDA or ROCm version that the driver offers", default=None)
    age_s: float | None = field("age of what is shown; None when nothing was ever read", default=None)


class GpuUse(Record):
    """One process's share of one GPU."""

    gpu: str = field("the GPU's id, such as gpu0")
    vram_bytes: int | None = field("video memory held there; None where the driver does not say", default=None)
    kind: str = field("compute, graphics or mps", default="compute")


class Workload(Record):
    """What a process belongs to, read from its control group."""

    kind: str = field("kubernetes, slurm, container or systemd")
    id: str = field("pod UID, Slurm job, container id or unit name")
    detail: Mapping[str, str] = field("what else the control group tells: container, step, slice", default={})


class AgentInfo(Record):
    """The agent inside a worker, when one is connected."""

    name: str = field("program that introduced itself")
    version: str = field("its version")
    framework: str | None = field("what trains there, such as torch; None if it has said nothing of it", default=None)
    framework_version: str | None = field("its version", default=None)
    job: str | None = field("the name of its `hegmctl run`; None without one", default=None)
    run: str | None = field("which `hegmctl run` it belongs to; the processes of one move as one", default=None)
    rank: int | None = field("its rank, in a distributed job", default=None)
    boundary: int | None = field("batch boundaries that it had passed when it was last heard of", default=None)
    parked: bool = field("whether its training thread is parked at a boundary", default=False)
    held_bytes: int = field("bytes of its storages that are out of the process", default=0)
    supervised: bool = field(
        "whether it has a `hegmctl run --allow-restart` as its parent, which would start it again", default=False
    )
    kept: bool = field(
        "whether a Python is prestarted that would continue from its state after a restart", default=False
    )
    image_missed: str | None = field(
        "why the last of the images that are taken of it now and then was not made; None if it was, or there are none",
        default=None,
    )
    on_cpu: bool = field(
        "whether it trains without a GPU, as far as it says: it can be started again on one", default=False
    )
    unknown: tuple[str, ...] | None = field(
        "for an agent that `hegmctl attach` loaded into a running process: what it cannot know, which blocks "
        "restarts but no move; None for an agent that began with its process",
        default=None,
    )


class Way(Record):
    """One way in which a process could be moved, and if it could not, why."""

    way: str = field("driver, agent, criu or restart")
    possible: bool = field("whether node and process allow it as they are now")
    reason: str = field("why not, or the reason why it is possible")


class GpuProcess(Record):
    """One process with a hand on at least one GPU. Its identity is pid and start time together."""

    pid: int = field("process id, in the driver's pid namespace")
    start_ticks: int | None = field(
        "start time in clock ticks since boot; None if it is not visible here", default=None
    )
    started_utc: float | None = field("start time in seconds since 1970", default=None)
    uid: int | None = field("owner", default=None)
    user: str | None = field("owner's name", default=None)
    name: str | None = field("short name of the program", default=None)
    command: str | None = field("command line; None when the caller may not see it", default=None)
    job: str | None = field("the id of its job, as `hegmctl jobs` shows it; nil if it belongs to none", default=None)
    workload: Workload | None = field("container, pod, Slurm job or unit it belongs to", default=None)
    gpus: tuple[GpuUse, ...] = field("its share of each GPU")
    held_bytes: int = field("bytes that hegmd holds for it outside the process", default=0)
    agent: AgentInfo | None = field("its agent, if connected", default=None)
    ways: tuple[Way, ...] = field("the ways of moving it, and why others are closed", default=())
    note: str | None = field("why something about it is unknown, or that it is stopped by a signal", default=None)


class Check(Record):
    """One line of `hegmctl doctor`."""

    id: str = field("stable name of the check, such as nvidia.driver")
    status: str = field("ok, warn, fail, or skip when it does not apply here")
    summary: str = field("what was found")
    fix: str | None = field("the exact command, or the step, that mends it", default=None)


# Every kind of event, by the family that can be asked for as a whole.
EVENT_KINDS: Mapping[str, tuple[str, ...]] = {
    "config": ("config.reloaded",),
    "events": ("events.missed",),
    "gpu": ("gpu.back", "gpu.found", "gpu.health", "gpu.lost", "gpu.mode"),
    "inventory": ("inventory.fresh", "inventory.ready", "inventory.stale"),
    "job": ("job.fell", "job.given-up", "job.hung", "job.protected", "job.recovered", "job.unprotected"),
    "operation": (
        *("operation.began", "operation.done", "operation.found", "operation.held", "operation.holding"),
        "operation.image-missed",
        *("operation.journal-failed", "operation.journal-mended", "operation.lost", "operation.recovered"),
        *("operation.suspended", "operation.rolling-back", "operation.rolled-back"),
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
    """Something that happened on the node, in the order in which the daemon saw it."""

    seq: int = field("counts up by one from the daemon's start; `run` in `welcome` tells one start from another")
    time_utc: float = field("seconds since 1970")
    kind: str = field("stable name, such as gpu.lost or process.started")
    severity: str = field("info, warning or error")
    message: str = field("one sentence")
    gpu: str | None = field("the GPU it is about", default=None)
    pid: int | None = field("the process it is about", default=None)
    facts: Mapping[str, object] = field("plain values for programs", default={})

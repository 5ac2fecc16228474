"""Which ways there are of moving a process off its GPU as node and process are now, and why the others are closed.

Owns the rules that follow from what drivers, CRIU and agents can do; the figures behind them were measured or are the
vendors' word. Pure: the same candidate on the same ground has the same ways. It looks and promises nothing: a way
that is open can still be refused when it is taken, for want of room on the target or for what cannot be seen from
outside. And it describes node and process, not what an operation would do, which is the plan's to say.

Every reason is one sentence that names the first thing in the way, because that is what an operator can act on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hegmd.protocol.snapshots import Gpu, Way

__all__ = ["Candidate", "GpuTraits", "Ground", "NodeMeans", "ground_of", "ways_of"]

NVIDIA, AMD, SIMULATED = "nvidia", "amd", "simulated"

# The checkpoint calls of libcuda came with CUDA 12.8, restoring onto another GPU with CUDA 13.0; these are the first
# drivers of the two.
CHECKPOINT_DRIVER = 570
MOVE_DRIVER = 580


@dataclass(frozen=True, slots=True)
class NodeMeans:
    """What hegmd itself has to move processes with: the user it runs as, and where criu is if it is anywhere."""

    uid: int
    criu_path: str | None = None


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """The part of a GPU that decides who can be moved from or to it. None is unknown and stands in nobody's way."""

    id: str
    vendor: str
    chip: str | None = None
    state: str = "ok"
    mig: bool | None = None
    mps: bool | None = None
    driver_version: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether processes have it as one card and without an intermediary, as far as is known."""
        return self.state == "ok" and not self.mig and not self.mps


@dataclass(frozen=True, slots=True)
class Ground:
    """The node on which a process is to be moved. Two that are equal give every candidate the same ways."""

    gpus: tuple[GpuTraits, ...]
    means: NodeMeans


@dataclass(frozen=True, slots=True)
class Candidate:
    """The part of a process that decides: its owner (None if the process cannot be seen), its agent, its GPUs.

    `uses` are pairs of a GPU's id and the kind of use: compute, graphics or mps. `on_cpu` it trains without any. `kept`
    is a Python that is ready to go on in its place.
    """

    visible: bool
    uid: int | None
    agent: str | None
    uses: tuple[tuple[str, str], ...]
    on_cpu: bool = False
    supervised: bool = False
    kept: bool = False


def ground_of(gpus: Sequence[Gpu], means: NodeMeans) -> Ground:
    """The ground that these GPUs make."""
    traits = (
        GpuTraits(
            id=gpu.id,
            vendor=gpu.vendor,
            chip=gpu.chip,
            state=gpu.state,
            mig=gpu.mig,
            mps=gpu.mps,
            driver_version=gpu.driver_version,
        )
        for gpu in gpus
    )
    return Ground(gpus=tuple(traits), means=means)


def ways_of(candidate: Candidate, ground: Ground) -> tuple[Way, ...]:
    """The four ways in the order in which one would want them."""
    if not candidate.uses and candidate.on_cpu:
        closed = [Way(way=way, possible=False, reason=_ON_CPU) for way in ("agent", "driver", "criu")]
        return (*closed, _restart_way(candidate))
    if not candidate.uses:
        return tuple(Way(way=way, possible=False, reason=_ON_NO_GPU) for way in ("agent", "driver", "criu", "restart"))
    by_id = {gpu.id: gpu for gpu in ground.gpus}
    own = tuple(by_id.get(gpu, GpuTraits(id=gpu, vendor="unknown", state="unknown")) for gpu, _ in candidate.uses)
    return (
        _agent_way(candidate, own, ground),
        _driver_way(candidate, own, ground),
        _criu_way(candidate, own, ground),
        _restart_way(candidate),
    )


_ON_CPU = "it trains on the CPU, and has nothing on a GPU"
_ON_NO_GPU = "it is on no GPU now; a suspended job goes on with `hegmctl resume`"


def _agent_way(candidate: Candidate, own: tuple[GpuTraits, ...], ground: Ground) -> Way:
    if candidate.agent is None:
        return Way(way="agent", possible=False, reason="no agent is connected from inside the process")
    agent = f"its agent, {candidate.agent}, can stop it between two batches"
    if any(gpu.vendor == AMD for gpu in own):
        reason = f"{agent}, but on AMD a living process cannot change its GPU; restart is the way"
        return Way(way="agent", possible=False, reason=reason)
    if all(gpu.vendor == SIMULATED for gpu in own):
        targets = _targets(own, ground)
        if not targets:
            return Way(way="agent", possible=False, reason=f"{agent}, but there is no other GPU like {_named(own)}")
        return Way(way="agent", possible=True, reason=f"{agent}, and {_either(targets)} could take it")
    refusal = _off_refusal(candidate, own, ground) or _onto_refusal(own, ground)
    if refusal is not None:
        return Way(way="agent", possible=False, reason=f"{agent}, but {refusal}")
    reason = f"{agent}, and the driver can bring it back on {_either(_targets(own, ground))}"
    return Way(way="agent", possible=True, reason=reason)


def _driver_way(candidate: Candidate, own: tuple[GpuTraits, ...], ground: Ground) -> Way:
    refusal = _off_refusal(candidate, own, ground) or _onto_refusal(own, ground)
    if refusal is not None:
        return Way(way="driver", possible=False, reason=refusal)
    reason = (
        f"driver {_driver(own)} can take it off {_named(own)} and bring it back on {_either(_targets(own, ground))}, "
        "unless it uses managed memory or NCCL between GPUs, which cannot be seen from outside"
    )
    return Way(way="driver", possible=True, reason=reason)


def _criu_way(candidate: Candidate, own: tuple[GpuTraits, ...], ground: Ground) -> Way:
    means = ground.means
    if not candidate.visible:
        return Way(way="criu", possible=False, reason=_UNSEEN)
    if means.criu_path is None:
        return Way(way="criu", possible=False, reason="criu is not installed; install version 4.1 or newer")
    if means.uid != 0:
        return Way(way="criu", possible=False, reason=f"criu needs root and hegmd runs as uid {means.uid}")
    refusal = _off_refusal(candidate, own, ground)
    if refusal is not None and candidate.agent is None:
        return Way(way="criu", possible=False, reason=f"its GPU state has to come off first, but {refusal}")
    first = "the driver" if refusal is None else "its agent"
    reason = f"{means.criu_path} can dump it once {first} has taken its state off {_named(own)}; see hegmctl doctor"
    return Way(way="criu", possible=True, reason=reason)


def _restart_way(candidate: Candidate) -> Way:
    if candidate.agent is None:
        reason = "no agent is connected that could save its state and find its place again"
        return Way(way="restart", possible=False, reason=reason)
    if not candidate.supervised:
        reason = "nobody would start it again; start the job with: hegmctl run --allow-restart -- COMMAND"
        return Way(way="restart", possible=False, reason=reason)
    kept = "; a Python is kept ready to go on from there" if candidate.kept else ""
    reason = f"its agent, {candidate.agent}, can save its state between two batches, for any GPU of any vendor{kept}"
    return Way(way="restart", possible=True, reason=reason)


_UNSEEN = "the process behind its pid cannot be seen from here, and nothing is done to a pid on trust"


def _off_refusal(candidate: Candidate, own: tuple[GpuTraits, ...], ground: Ground) -> str | None:
    """Why the driver cannot take the process off its GPUs, or None if nothing speaks against it."""
    for gpu in own:
        if gpu.vendor == SIMULATED:
            return f"{gpu.id} is simulated and has no driver underneath"
        if gpu.vendor != NVIDIA:
            return f"only NVIDIA's driver has calls for that, and {gpu.id} is of vendor {gpu.vendor}"
    if not candidate.visible:
        return _UNSEEN
    uid = ground.means.uid
    if uid not in (0, candidate.uid):
        return f"the driver lets uid {uid}, as which hegmd runs, act on its own processes only; run hegmd as root"
    for gpu, (_, kind) in zip(own, candidate.uses, strict=True):
        if refusal := _gpu_refusal(gpu, kind):
            return refusal
    return None


def _gpu_refusal(gpu: GpuTraits, kind: str) -> str | None:
    if gpu.state != "ok":
        return f"the state of {gpu.id} is {gpu.state}"
    if kind == "mps" or gpu.mps:
        return f"{gpu.id} is shared through MPS, which the driver's checkpoint refuses"
    if gpu.mig:
        return f"{gpu.id} is cut into MIG instances, which the driver's checkpoint refuses"
    if kind == "graphics":
        return f"it draws on {gpu.id}, and the driver's checkpoint takes CUDA state only"
    major = _major(gpu.driver_version)
    if major is None:
        return f"the driver version of {gpu.id} is not known"
    if major < CHECKPOINT_DRIVER:
        return f"driver {gpu.driver_version} has no checkpoint calls; {CHECKPOINT_DRIVER} or newer has"
    return None


def _onto_refusal(own: tuple[GpuTraits, ...], ground: Ground) -> str | None:
    """Why the driver, having taken the process off, cannot bring it back on another GPU of this node."""
    for gpu in own:
        major = _major(gpu.driver_version)
        if major is not None and major < MOVE_DRIVER:
            return (
                f"driver {gpu.driver_version} can only bring it back on {_named(own)}; "
                f"{MOVE_DRIVER} or newer can on another GPU"
            )
        if gpu.chip is None:
            return f"the chip of {gpu.id} is not known, and another GPU must have the same"
    if not _targets(own, ground):
        return f"no other GPU of this node that could take it has the chip of {_named(own)}"
    return None


def _targets(own: tuple[GpuTraits, ...], ground: Ground) -> tuple[GpuTraits, ...]:
    """The GPUs that it is not on and that are like one that it is on."""
    taken = {gpu.id for gpu in own}
    kinds = {(gpu.vendor, gpu.chip) for gpu in own}
    return tuple(gpu for gpu in ground.gpus if gpu.id not in taken and (gpu.vendor, gpu.chip) in kinds and gpu.is_whole)


def _major(version: str | None) -> int | None:
    head = (version or "").partition(".")[0]
    return int(head) if head.isascii() and head.isdigit() else None


def _driver(own: tuple[GpuTraits, ...]) -> str:
    return next((gpu.driver_version for gpu in own if gpu.driver_version is not None), "")


def _named(gpus: Sequence[GpuTraits]) -> str:
    names = list(dict.fromkeys(gpu.id for gpu in gpus))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _either(gpus: Sequence[GpuTraits]) -> str:
    names = [gpu.id for gpu in gpus]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

"""Checks for every vendor, from the GPUs' records: health, and links between GPUs."""

from __future__ import annotations

from itertools import combinations

from hegmd.node.doctor.facts import CheckResult, NodeFacts, counted, fail, listed, ok, skip, warn
from hegmd.protocol.snapshots import Gpu


def absent(facts: NodeFacts) -> str | None:
    """Return why there is nothing to check, or None."""
    return None if facts.gpus else "there is no GPU on this node"


def health(facts: NodeFacts) -> CheckResult:
    """No GPU is lost, and none reports errors."""
    for gpu in facts.gpus:
        if gpu.state == "lost":
            return fail(f"{gpu.id} has fallen off the bus", _reset(gpu))
        if gpu.state == "unknown":
            return fail(f"{gpu.id}: the vendor's library does not answer for it", _details(gpu))
    ill = [gpu for gpu in facts.gpus if gpu.health.state in ("warn", "failed")]
    if ill:
        worst = next((gpu for gpu in ill if gpu.health.state == "failed"), ill[0])
        reason = listed(worst.health.notes, 1) or "the driver reports errors"
        others = f"; also {listed((gpu.id for gpu in ill if gpu is not worst), 3)}" if len(ill) > 1 else ""
        line = f"{worst.id}: {reason}{others}"
        return fail(line, _reset(worst)) if worst.health.state == "failed" else warn(line, _details(worst))
    silent = [gpu.id for gpu in facts.gpus if gpu.health.state == "unknown"]
    if len(silent) == len(facts.gpus):
        return skip(f"the driver does not report the health of {listed(silent)}")
    reporting = len(facts.gpus) - len(silent)
    return ok(f"{counted(reporting, 'GPU')} without errors" + (f"; {listed(silent)} unknown" if silent else ""))


def peers(facts: NodeFacts) -> CheckResult:
    """Every two GPUs of one chip have a link that avoids host memory."""
    pairs = [
        (one, other)
        for one, other in combinations([gpu for gpu in facts.gpus if gpu.state == "ok"], 2)
        if one.vendor == other.vendor and one.chip == other.chip
    ]
    if not pairs:
        return skip("there are no two GPUs of the same chip")
    apart = [(one.id, other.id) for one, other in pairs if not _linked(one, other) or not _linked(other, one)]
    if apart:
        shown = listed((f"{one} and {other}" for one, other in apart), 2)
        fix = "nvidia-smi topo -p2p r" if pairs[0][0].vendor == "nvidia" else "amd-smi topology"
        return warn(f"no direct link between {shown}: moves there go through host memory", fix)
    kinds = sorted({link.kind for gpu in facts.gpus for link in gpu.links})
    ways = counted(len(pairs), "pair") + (" of GPUs has" if len(pairs) == 1 else " of GPUs have")
    return ok(f"{ways} a direct link ({', '.join(kinds)})")


def _linked(one: Gpu, other: Gpu) -> bool:
    return any(link.to_uuid == other.uuid for link in one.links)


def _details(gpu: Gpu) -> str:
    if gpu.vendor == "nvidia":
        return f"nvidia-smi -q -i {gpu.pci_address or gpu.index} -d ECC,PAGE_RETIREMENT,ROW_REMAPPER,PERFORMANCE"
    if gpu.vendor == "amd":
        return f"amd-smi metric --gpu {gpu.index} --ecc"
    return f"hegmctl simulate fault {gpu.id} none"


def _reset(gpu: Gpu) -> str:
    if gpu.vendor == "nvidia":
        return (
            f"after its jobs have ended: sudo nvidia-smi --gpu-reset -i {gpu.pci_address or gpu.index}; if lost: reboot"
        )
    if gpu.vendor == "amd":
        return f"after its jobs have ended: sudo amd-smi reset --gpureset --gpu {gpu.index}; if lost: reboot"
    return _details(gpu)

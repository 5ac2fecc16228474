"""The needs of a suspend that keeps CUDA contexts, the memory that stays, and where such a job can resume. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hegmd.errors import REFUSED
from hegmd.memory.sizes import RESTORE_MARGIN_BYTES
from hegmd.migration.machine.operation import RESUME, SUSPEND, JobProcess, Operation
from hegmd.migration.machine.wording import gigabytes, named
from hegmd.migration.model import CARRIERS, Candidate, CarrierRow, GpuMemory
from hegmd.migration.plan import carrier_choice, driver_rules
from hegmd.migration.plan.carrier_choice import Choice, Refusal
from hegmd.migration.plan.draft import Draft
from hegmd.node.gpu_sets import gpus_of, is_several, place_of
from hegmd.protocol.operations import BY_DRIVER, KEEP_CONTEXT, WORKER, PlannedProcess

NVIDIA, SIMULATED = "nvidia", "simulated"
# The helper opens no memory of processes that these confine.
_BY_WORKER_ONLY: Mapping[str, CarrierRow] = {WORKER: CARRIERS[WORKER], BY_DRIVER: CARRIERS[BY_DRIVER]}


def place(draft: Draft, candidate: Candidate, own: tuple[GpuMemory, ...]) -> None:
    """Plan that the storages of one process leave its GPUs, and nothing else."""
    source, who = place_of(candidate.gpus), f"process {candidate.pid}"
    if candidate.agent is None:
        hint = f"start the job with hegmctl run; or suspend it without --keep-context: hegmctl suspend {candidate.pid}"
        draft.against(REFUSED, f"{who} has no agent, which --keep-context needs", hint, pid=candidate.pid)
        return
    if candidate.around.stopped:
        message = f"{who} is stopped (SIGSTOP), so it cannot reach a boundary"
        draft.against(REFUSED, message, f"run: kill -CONT {candidate.pid}", pid=candidate.pid)
    if own[0].vendor not in (NVIDIA, SIMULATED):
        message = f"{source} is of vendor {own[0].vendor}, from which no carrier can copy"
        draft.against(REFUSED, message, "use NVIDIA GPUs, or a restart: hegmctl run --allow-restart", gpu=source)
        return
    choice = _choice(draft, candidate, own)
    if isinstance(choice, Refusal) or choice.carrier == BY_DRIVER:
        why = choice.message if isinstance(choice, Refusal) else f"its bytes cannot leave {source}: {choice.why}"
        hint = choice.hint if isinstance(choice, Refusal) else f"suspend it whole: hegmctl suspend {candidate.pid}"
        draft.against(REFUSED, f"{who} cannot keep its context: {why}", hint, pid=candidate.pid)
        return
    devices = driver_rules.devices_of(draft.snapshot, candidate) if len(candidate.gpus) > 1 else ()
    by_gpu = driver_rules.storage_bytes_with_cache(candidate, devices, own) if devices else ()
    overhead_bytes = driver_rules.agent_overhead_of(candidate, own[0])
    if by_gpu:
        overhead_bytes = sum(by_gpu) - sum(device.size_bytes for device in devices)
    draft.choices[candidate.pid] = choice
    draft.workers.append(
        PlannedProcess(
            pid=candidate.pid,
            name=named(candidate),
            gpu=source,
            to=None,
            size_bytes=candidate.agent.size_bytes or 0,
            left_alone_bytes=sum(item.size_bytes for item in candidate.agent.left_alone),
            carrier=choice.carrier,
            method=KEEP_CONTEXT,
            stays_bytes=_stays_bytes(candidate, own[0]),
            agent_overhead_bytes=overhead_bytes,
            driver_bytes_by_gpu=(0,) * len(by_gpu),
            storage_bytes_by_gpu=by_gpu,
            own_bytes=carrier_choice.own_bytes(candidate, choice.carrier),
        )
    )


def offered(draft: Draft, candidate: Candidate, hint: str) -> str:
    """The hint to a refusal of the driver's checkpoint, with this way out where it may be one."""
    is_one = draft.request.kind == SUSPEND and candidate.agent is not None and not candidate.around.stopped
    return f"{hint}; or free its tensors only: hegmctl suspend --keep-context {candidate.pid}" if is_one else hint


def _choice(draft: Draft, candidate: Candidate, own: tuple[GpuMemory, ...]) -> Choice | Refusal:
    carrier = draft.request.carrier
    if carrier == BY_DRIVER:
        return Refusal(f"{BY_DRIVER} carries bytes by the driver's checkpoint only", "omit --carrier")
    if own[0].vendor == SIMULATED:
        if carrier not in (None, WORKER):
            return Refusal(f"on simulated GPUs its bytes go by {WORKER} only", f"use --carrier {WORKER}")
        return Choice(WORKER, pool_bytes=0 if candidate.agent is None else candidate.agent.size_bytes or 0)
    is_confined = any(gpu.mig or gpu.mps for gpu in own) or "mps" in candidate.kinds
    if is_confined and carrier not in (None, WORKER):
        return Refusal(f"{str(carrier)[:40]} cannot copy under MIG or MPS", f"use --carrier {WORKER}")
    rows = _BY_WORKER_ONLY if is_confined else CARRIERS
    return carrier_choice.choose_as_asked(draft.snapshot, draft.request, candidate, own, (), rows)


def _stays_bytes(candidate: Candidate, own: GpuMemory) -> int | None:
    """Return the process's memory beyond its allocator's, as NVML shows it; None if unknown."""
    if own.vendor == SIMULATED and candidate.agent is not None:
        return sum(item.size_bytes for item in candidate.agent.left_alone)
    if candidate.vram_bytes is None:
        return None
    return max(0, driver_rules.rest_of(candidate) - RESTORE_MARGIN_BYTES - driver_rules.stacks_of(candidate))


def notes(draft: Draft, kind: str) -> Iterator[str]:
    """Notes for the user before the operation."""
    for worker in draft.moving:
        if worker.method != KEEP_CONTEXT:
            continue
        if kind == RESUME:
            yield f"process {worker.pid} has kept its CUDA context on {worker.to}: no driver call is made"
            continue
        stays = "an unknown amount" if worker.stays_bytes is None else gigabytes(worker.stays_bytes)
        yield (
            f"{stays} of process {worker.pid} stays on {worker.gpu}: its CUDA context and what its agent does not "
            f"offload; it can resume on {worker.gpu} only"
        )


def cannot_resume(draft: Draft, worker: JobProcess, to: str) -> bool:
    """Return True if its context is on another GPU, or on a lost one; the reason is in the draft then."""
    home = worker.previous_gpu or worker.first_gpu
    if not worker.keeps_context or home is None:
        return False
    if to == home:
        lost = [gpu for name in gpus_of(home) if (gpu := draft.gpu(name)) is not None and gpu.state != "ok"]
        for gpu in lost:
            message = f"{gpu.id} is {gpu.state}, and process {worker.pid} has its CUDA context there"
            draft.against(REFUSED, message, "run: hegmctl doctor; its bytes are kept", pid=worker.pid, gpu=gpu.id)
        return bool(lost)
    message = f"process {worker.pid} keeps its CUDA context on {home} and can resume there only, not on {to}"
    there = f" --to {to}" if not is_several(to) and len(gpus_of(home)) == 1 else ""
    hint = f"run: hegmctl resume {worker.pid}" + (f"; then: hegmctl migrate {worker.pid}{there}" if there else "")
    draft.against(REFUSED, message, hint, pid=worker.pid, gpu=to)
    return True


def against_image(op: Operation) -> tuple[str, str] | None:
    """Why a suspended job cannot be written into an image, and the next step; None if it can."""
    pid = next((worker.pid for worker in op.live if worker.keeps_context), None)
    if pid is None:
        return None
    return (
        f"process {pid} keeps its CUDA context on its GPU, which an image cannot have",
        f"run: hegmctl resume {pid}; then: hegmctl checkpoint {pid} DIR",
    )

"""The cases of the run over moves: every carrier with every verb, every training with every carrier that can take it.

`CASES` is in the order in which they are run: first what has been seen least, and what has to wait for others later.
A name is the verb, or what happens and in which stage, then the training, then the carrier where it is not left to
the plan. `LEFT_OUT` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tests.gpu.moves_jobs import KINDS, Jobs, on_stub
from tests.gpu.moves_node import KEEPER, MANAGER, Account, Node, WentWrongError, until
from tests.gpu.moves_trial import Trial
from tests.gpu.moves_trouble import (
    Act,
    beside_neighbour,
    cancel,
    grabbed,
    grabbed_while_away,
    interrupted,
    interrupted_in,
    interrupted_out,
    kill_daemon,
    kill_helper,
)

# The carriers that can take a training, by the carrier that the plan chooses for it.
ABLE = {"peer": ("peer", "host", "worker", "driver"), "worker": ("worker", "driver"), "driver": ("driver",)}
# The states in which an operation is interrupted; those between them last a few milliseconds.
STAGES = ("offloading", "checkpointing", "restoring", "reloading", "reserving", "quiescing", "verifying")
# The states in which bytes are in flight, by carrier.
BUSY = {
    "host": ("offloading", "checkpointing", "restoring", "reloading"),
    "worker": ("offloading", "reloading"),
    "driver": ("checkpointing", "restoring"),
}
ACTS: dict[str, Act] = {"cancel": cancel, "helper": kill_helper, "daemon": kill_daemon}
# Trainings that are alike to a carrier, so that cancelled ones can run side by side.
ALIKE = ("plain", "amp", "streams")
SEEN_LEAST = ("streams", "workers")
# Kinds on one GPU each; those on several have cases of their own.
ON_ONE = tuple(name for name, kind in KINDS.items() if kind.gpus == 1)
LEFT_OUT = (
    "peer x suspend, resume: only from GPU to GPU; the plan's choice there is host",
    "peer, host, worker x graph, C++, JAX: no agent vouches for their storages; refused by the plan",
    "peer, host x expandable segments, cudaMallocAsync: CUDA IPC does not show such memory; refused by the plan",
    "carriers x swap, drain: chosen by the plan; each is met by the trainings that have it",
    "interruptions x trainings: of plain and its likes; what is interrupted is the same code for all of them",
    "interruptions in settling, counting, measuring, leaving, releasing, tidying: over within milliseconds",
)


# ---- operations -----------------------------------------------------------------------------------------------------


def move(trial: Trial, kind: str, carrier: str | None = None) -> None:
    """Move to the other GPU, by the requested carrier, or else by the right one for this training."""
    job = trial.job(kind)
    source, before, began = job.gpu, trial.look(), time.monotonic()
    trial.migrate(job, 1 - source, carrier)
    trial.arrived(job, 1 - source, before)
    trial.found.gap_s = job.longest_gap_s(began)
    _was_carried_by(trial, carrier or KINDS[kind].carrier)
    if carrier == "driver" and KINDS[kind].agent:
        trial.jobs.end(kind)  # what the driver has brought back cannot be shown; the next case wants one that can


def keep(trial: Trial, kind: str, carrier: str | None = None) -> None:
    """Its tensors off its GPU, its context there, and back; twice, as with time slices."""
    job = trial.job(kind)
    for _ in range(2):
        source, before = job.gpu, trial.look()
        suspended = trial.suspend(job, carrier, keep_context=True)
        _was_carried_by(trial, carrier or KINDS[kind].suspended_by)
        trial.kept(job, suspended, before)
        carried = trial.found.carrier
        trial.resume(job)
        trial.found.carrier = carried
        trial.arrived(job, source, before)


def rest(trial: Trial, kind: str, carrier: str | None = None, *, elsewhere: bool = False) -> None:
    """Off its GPU, with nothing left on any, and back, or on to the other."""
    job = trial.job(kind)
    source, before = job.gpu, trial.look()
    suspended = trial.suspend(job, carrier)
    _was_carried_by(trial, carrier or KINDS[kind].suspended_by)
    trial.gone(job, before)
    to = 1 - source if elsewhere else None
    carried = trial.found.carrier
    resumed = trial.resume(job, to)
    trial.found.carrier = carried
    trial.arrived(job, source if to is None else to, before)
    if resumed.downtime_s is not None:
        trial.note(f"{suspended.size_bytes >> 20} MiB, resumed in {resumed.downtime_s * 1e3:.0f} ms")
    if carrier == "driver" and KINDS[kind].agent:
        trial.jobs.end(kind)


def _was_carried_by(trial: Trial, wanted: str) -> None:
    if trial.found.carrier != wanted:
        raise WentWrongError(f"carried by {trial.found.carrier}, and {wanted} would have been right")


def shown_after_driver(trial: Trial) -> None:
    """Memory that the driver restored cannot be exported to the helper: the next move uses the worker's own copies."""
    job = trial.job()
    trial.migrate(job, 1 - job.gpu, "driver")
    job.is_whole()
    source, before = job.gpu, trial.look()
    trial.migrate(job, 1 - source)
    trial.arrived(job, 1 - source, before)
    _was_carried_by(trial, "worker")
    trial.jobs.end("plain")


def swap(trial: Trial, first: str, second: str) -> None:
    """Two jobs change places."""
    one, other = trial.job(first), trial.job(second)
    if one.gpu == other.gpu:
        trial.migrate(other, 1 - one.gpu)
    before, places, began = trial.look(), (one.gpu, other.gpu), time.monotonic()
    trial.node.hegmctl("swap", str(one.pid), str(other.pid))
    trial.arrived(one, places[1], before)
    trial.arrived(other, places[0], before)
    trial.note(f"longest gaps {one.longest_gap_s(began) * 1e3:.0f} and {other.longest_gap_s(began) * 1e3:.0f} ms")
    trial.found.carrier = ""


def drain(trial: Trial, kinds: tuple[str, ...]) -> None:
    """Everything off a GPU: with an agent and without."""
    trial.jobs.end_all(but=kinds)
    jobs = [trial.job(kind) for kind in kinds]
    gpu = jobs[0].gpu
    for job in jobs[1:]:
        if job.gpu != gpu:
            trial.migrate(job, gpu)
    trial.jobs.wait_for_references()
    before = trial.look()
    trial.node.hegmctl("drain", f"gpu{gpu}")
    for job in jobs:
        trial.arrived(job, 1 - gpu, before)
    left = trial.node.gpus.account()
    if left.by_process[gpu]:
        raise WentWrongError(f"gpu{gpu} was drained, and has {left.by_process[gpu]} MiB")
    trial.note(f"drained: {left.used_mib[gpu]:.1f} MiB in use")
    trial.found.carrier = ""


def exchange(trial: Trial, carrier: str | None = None) -> None:
    """Exchange the GPUs of one process on two GPUs: each device goes to the place of the other, and back."""
    job, before = trial.job("two"), trial.look()
    for places in ("gpu1,gpu0", "gpu0,gpu1"):  # in the order of the process's devices
        trial.migrate(job, places, carrier)
        trial.arrived(job, (0, 1), before)
    _was_carried_by(trial, carrier or KINDS["two"].carrier)


def rest_of_two(trial: Trial, carrier: str | None = None) -> None:
    """The same process off both, and back."""
    job, before = trial.job("two"), trial.look()
    suspended = trial.suspend(job, carrier)
    _was_carried_by(trial, carrier or "host")
    trial.gone(job, before)
    resumed = trial.resume(job)
    trial.arrived(job, (0, 1), before)
    trial.note(f"{suspended.size_bytes >> 20} MiB, resumed in {(resumed.downtime_s or 0.0) * 1e3:.0f} ms")


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One case and its trainings.

    `beside` is the shape in which it can run concurrently with others: cases of one shape meet equally often. `quick`
    cases are in the short run.
    """

    run: Callable[[Trial], None]
    kinds: tuple[str, ...] = ("plain",)
    carrier: str = ""
    beside: str = ""
    kept_by: str = MANAGER
    quick: bool = False


def _table() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    cases["migrate-two"] = Case(exchange, ("two",), quick=True)
    cases["suspend-two"] = Case(rest_of_two, ("two",), quick=True)
    for carrier in ("host", "worker"):
        cases[f"migrate-two-{carrier}"] = Case(partial(exchange, carrier=carrier), ("two",), carrier)
    cases["suspend-two-worker"] = Case(partial(rest_of_two, carrier="worker"), ("two",), "worker")
    for kind in SEEN_LEAST:
        cases |= _by_choice(kind)
    for stage, kind in zip(STAGES, ALIKE * len(STAGES), strict=False):
        run = partial(interrupted, stage=stage, act=cancel, kind=kind)
        cases[f"cancel-{stage}"] = Case(run, (kind,), beside="move", quick=stage == "checkpointing")
    cases["swap"] = Case(partial(swap, first="plain", second="amp"), ("plain", "amp"))
    cases |= _by_choice("large")
    for name, act in (("helper", kill_helper), ("daemon", kill_daemon)):
        for stage in STAGES:
            cases[f"{name}-{stage}"] = Case(partial(interrupted, stage=stage, act=act), quick=stage in STAGES[:4])
    cases |= _by_choice("compiled")
    cases["drain"] = Case(partial(drain, kinds=("plain", "amp", "cuda")), ("plain", "amp", "cuda"))
    cases |= dict(_others())
    for carrier in ABLE["peer"]:
        cases[f"migrate-plain-{carrier}"] = Case(
            partial(move, kind="plain", carrier=carrier), carrier=carrier, beside="move", quick=True
        )
    for kind in ON_ONE:
        cases |= _by_choice(kind)
    cases |= dict(_keeping_contexts())
    cases |= dict(_interruptions_by_others())
    cases |= dict(_kept_by_keeper())
    cases |= dict(_by_others())
    cases["swap-worker"] = Case(partial(swap, first="expandable", second="async"), ("expandable", "async"))
    cases["swap-driver"] = Case(partial(swap, first="cuda", second="plain"), ("cuda", "plain"))
    cases["drain-driver"] = Case(partial(drain, kinds=("graph", "expandable")), ("graph", "expandable"))
    return cases


def _by_choice(kind: str) -> dict[str, Case]:
    """Moved and suspended by the carrier that the plan chooses."""
    alone = kind in {"large", "jax"}  # what takes so much of the link or the memory is not to share it
    cases = {
        f"migrate-{kind}": Case(partial(move, kind=kind), (kind,), beside="" if alone else "move"),
        f"suspend-{kind}": Case(partial(rest, kind=kind), (kind,), beside="" if alone else "rest"),
    }
    if kind in {"plain", "cuda", "graph"}:
        run = partial(rest, kind=kind, elsewhere=True)
        cases[f"resume-elsewhere-{kind}"] = Case(run, (kind,), beside="rest")
    return cases


def _others() -> Iterator[tuple[str, Case]]:
    """Others on the GPU that the job goes to, and what came before."""
    for neighbour in ("amp", "cuda"):
        run = partial(beside_neighbour, kind="plain", neighbour=neighbour)
        yield f"neighbour-{neighbour}", Case(run, ("plain", neighbour), quick=neighbour == "amp")
    for stage in ("quiescing", "restoring"):
        yield f"grabbed-plain-{stage}", Case(partial(grabbed, kind="plain", stage=stage))
    yield "grabbed-cuda", Case(partial(grabbed, kind="cuda", stage="checkpointing"), ("cuda",))
    yield "grabbed-away", Case(partial(grabbed_while_away, kind="plain"))
    yield "shown-after-driver", Case(shown_after_driver, carrier="worker")


def _interruptions_by_others() -> Iterator[tuple[str, Case]]:
    """The same happens to what the other carriers carry, and to suspensions and resumes."""
    for name, act in ACTS.items():
        for stage in ("offloading", "checkpointing"):
            yield f"{name}-suspend-{stage}", Case(partial(interrupted_out, stage=stage, act=act))
        for stage in ("restoring", "reloading"):
            yield f"{name}-resume-{stage}", Case(partial(interrupted_in, stage=stage, act=act))
    yield "daemon-suspended", Case(partial(interrupted_in, stage="suspended", act=kill_daemon))
    for carrier, stages in BUSY.items():
        for stage in stages:
            for name, act in ACTS.items():
                run = partial(interrupted, stage=stage, act=act, carrier=carrier)
                yield f"{name}-{stage}-{carrier}", Case(run, carrier=carrier)


def _keeping_contexts() -> Iterator[tuple[str, Case]]:
    """Suspensions that keep contexts, by each carrier, and what can happen to them."""
    for kind in ("plain", "expandable", "async", "amp", "streams"):
        yield f"keep-context-{kind}", Case(partial(keep, kind=kind), (kind,), beside="keep", quick=kind == "plain")
    yield "keep-context-plain-worker", Case(partial(keep, kind="plain", carrier="worker"), carrier="worker")
    for name, act in ACTS.items():
        for stage in ("offloading", "checkpointing"):
            run = partial(interrupted_out, stage=stage, act=act, keep_context=True)
            yield f"{name}-keep-context-{stage}", Case(run)
        run = partial(interrupted_in, stage="reloading", act=act, keep_context=True)
        yield f"{name}-keep-context-reloading", Case(run)
    run = partial(interrupted_in, stage="suspended", act=kill_daemon, keep_context=True)
    yield "daemon-keep-context-suspended", Case(run)


def _kept_by_keeper() -> Iterator[tuple[str, Case]]:
    """The daemon dies with bytes under way where there is no service manager: its own keeper has them."""
    for carrier in ("peer", "host"):
        for stage in ("offloading", "checkpointing", "restoring", "reloading"):
            run = partial(interrupted, stage=stage, act=kill_daemon, carrier=carrier)
            yield f"keeper-{stage}-{carrier}", Case(run, kept_by=KEEPER)
    run = partial(interrupted_in, stage="suspended", act=kill_daemon)
    yield "keeper-suspended", Case(run, kept_by=KEEPER)


def _by_others() -> Iterator[tuple[str, Case]]:
    """Each training by each carrier that can take it and that the plan would not choose."""
    for name in ON_ONE:
        kind = KINDS[name]
        for carrier in ABLE[kind.carrier] if name != "plain" else ():
            # For the slow ones, 40 GiB show no more than 1 GiB.
            if carrier != kind.carrier and not (name == "large" and carrier in {"worker", "driver"}):
                shape = "" if name == "large" else "move"
                run = partial(move, kind=name, carrier=carrier)
                yield f"migrate-{name}-{carrier}", Case(run, (name,), carrier=carrier, beside=shape)
        for carrier in ABLE[kind.carrier]:
            if carrier not in {"peer", kind.suspended_by} and name != "large":
                run = partial(rest, kind=name, carrier=carrier)
                yield f"suspend-{name}-{carrier}", Case(run, (name,), carrier=carrier, beside="rest")


CASES = _table()
LAST = "nothing-left"
DRIVERS_OWN_MIB = 4.0


def nothing_left(node: Node, jobs: Jobs, idle: Account) -> str:
    """With every job ended, no process is on any GPU, and each has what it had at first. Raises WentWrongError.

    The driver keeps some itself from the first use of a GPU on: 3.2 MiB on each of two H200.
    """
    jobs.end_all()
    jobs.end_references()

    def more() -> list[float]:
        account = node.gpus.account()
        return [now - was for now, was in zip(account.used_mib, idle.used_mib, strict=True)]

    try:
        until(
            lambda: all(-1 < mib < DRIVERS_OWN_MIB for mib in more()) and not any(node.gpus.account().by_process),
            "that the GPUs are as they were at first",
        )
    except WentWrongError as error:
        there = [sorted(shares) for shares in node.gpus.account().by_process]
        raise WentWrongError(f"{error}: {'/'.join(f'{mib:+.1f}' for mib in more())} MiB, processes {there}") from error
    if node.keeper.stored():
        raise WentWrongError(f"the keeper still has {node.keeper.stored()}")
    pool = list(_open_in(node.daemon.pid))
    if any("memfd:hegm" in target or "anon_inode:nv" in target for target in pool):
        raise WentWrongError(f"the daemon still has {pool}")
    return f"{'/'.join(f'{mib:+.1f}' for mib in more())} MiB beside the start{' (stub)' if on_stub() else ''}"


def _open_in(pid: int) -> Iterator[str]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{fd}")

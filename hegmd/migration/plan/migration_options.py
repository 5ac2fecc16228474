"""Which methods can move a process, and why the others cannot: what `hegmctl ps --ways` shows.

Owns the choice of the reason that is shown. The planner's code judges each method, so `ps --ways`, `suspend`,
`checkpoint` and `migrate` cannot differ. GPU and pool memory are left out: they describe the moment and not the
process. Pure.

Every reason is one sentence that names the first obstacle, because that is what an operator can act on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from hegmd.migration.machine.operation import CHECKPOINT, MIGRATE, RESTART, SUSPEND
from hegmd.migration.model import AgentSurvey, Candidate, GpuMemory, NodeSnapshotForPlan, PlanRequest
from hegmd.migration.plan import driver_rules
from hegmd.migration.plan.members import NVIDIA
from hegmd.migration.plan.planner import against_leaving
from hegmd.protocol.snapshots import GONE, GpuProcess, Way

AMD, SIMULATED = "amd", "simulated"
_LIVE_WAYS = ("agent", "driver", "criu")

_ON_CPU = "it trains on the CPU, and uses no GPU"
_ON_NO_GPU = "it is on no GPU now; resume a suspended job with `hegmctl resume`"
_UNSEEN = "hegmd cannot see the process with this pid, and does not act on a pid it cannot verify"


def ways_of(
    snapshot: NodeSnapshotForPlan, processes: Collection[GpuProcess], criu_path: str | None
) -> Mapping[int, tuple[Way, ...]]:
    """Return the four ways of each process by pid, in the order of preference."""
    families = _Families(snapshot)
    return {process.pid: tuple(_ProcessOnNode(families, process, criu_path).ways()) for process in processes}


class _Families:
    """The processes that move together: each family is judged once, and without a look at all the others."""

    def __init__(self, snapshot: NodeSnapshotForPlan) -> None:
        self.snapshot = snapshot
        self.by_pid = {candidate.pid: candidate for candidate in snapshot.candidates}
        self._by_job: dict[tuple[int | None, str], list[Candidate]] = {}
        self._by_root: dict[int, list[Candidate]] = {}
        self._judged: dict[tuple[tuple[int, ...], str], str | None] = {}
        for one in snapshot.candidates:
            self._by_root.setdefault(self._root(one), []).append(one)
            if one.job is not None:
                self._by_job.setdefault((one.uid, one.job), []).append(one)

    def against(self, candidate: Candidate, request: PlanRequest) -> str | None:
        """Return the first reason against that request for the process and those that move with it, or None."""
        found = {one.pid: one for one in self._by_root[self._root(candidate)]}
        if candidate.job is not None:
            found |= {one.pid: one for one in self._by_job[candidate.uid, candidate.job]}
        key = (tuple(sorted(found)), request.via or request.kind)
        if key not in self._judged:
            family = tuple([_as_if_asked(one) for one in found.values()])
            reasons = against_leaving(self.snapshot.replace(candidates=family), request)
            self._judged[key] = reasons[0].message if reasons else None
        return self._judged[key]

    def _root(self, candidate: Candidate) -> int:
        visited = {candidate.pid}
        while candidate.parent in self.by_pid and candidate.parent not in visited:
            candidate = self.by_pid[candidate.parent]
            visited.add(candidate.pid)
        return candidate.pid


def _as_if_asked(candidate: Candidate) -> Candidate:
    """Fill in answers that the agent was never asked for: the operation itself asks for them."""
    agent = candidate.agent
    if agent is None:
        return candidate
    known: AgentSurvey = agent.replace(size_bytes=agent.size_bytes or 0, state_bytes=agent.state_bytes or 0)
    return candidate.replace(agent=known)


class _ProcessOnNode:
    def __init__(self, families: _Families, process: GpuProcess, criu_path: str | None) -> None:
        self._families = families
        self._process = process
        self._criu_path = criu_path
        self._candidate = families.by_pid.get(process.pid)
        memory_by_gpu = {gpu.id: gpu for gpu in families.snapshot.gpus}
        names = dict.fromkeys(use.gpu for use in process.gpus)
        unknown = GpuMemory(id="", vendor="unknown", state="unknown", free_bytes=None)
        self._own = tuple([memory_by_gpu.get(name, unknown.replace(id=name)) for name in names])
        agent = process.agent
        self._agent = None if agent is None else f"{agent.name} {agent.version}".rstrip()

    def ways(self) -> Iterator[Way]:
        on_cpu = self._process.agent is not None and self._process.agent.on_cpu
        if not self._own:
            yield from (_closed(way, _ON_CPU if on_cpu else _ON_NO_GPU) for way in _LIVE_WAYS)
            yield self._by_restart() if on_cpu else _closed("restart", _ON_NO_GPU)
            return
        yield self._by_agent()
        yield self._by_driver()
        yield self._by_criu()
        yield self._by_restart()

    def _by_agent(self) -> Way:
        if self._agent is None:
            return _closed("agent", "no agent is connected from inside the process")
        agent = f"its agent, {self._agent}, can quiesce it between two batches"
        if any(gpu.vendor == AMD for gpu in self._own):
            return _closed("agent", f"{agent}, but on AMD a running process cannot change its GPU; use restart")
        refusal = self._against(SUSPEND) or self._against_target()
        if refusal is not None:
            return _closed("agent", f"{agent}, but {refusal}")
        if all(gpu.vendor == SIMULATED for gpu in self._own):
            return _open("agent", f"{agent}, and {_either(self._targets())} has enough free memory")
        return _open("agent", f"{agent}, and the driver can restore it on {_either(self._targets())}")

    def _by_driver(self) -> Way:
        refusal = self._against_driver() or self._against(SUSPEND) or self._against_target()
        if refusal is not None:
            return _closed("driver", refusal)
        versions = [gpu.driver_version for gpu in self._own if gpu.driver_version is not None]
        unseen = "unless it uses managed memory or CUDA IPC, which hegmd cannot see from outside"
        reason = (
            f"driver {versions[0] if versions else ''} can checkpoint it on {_named(self._own)} and restore it on "
            f"{_either(self._targets())}"
        )
        return _open("driver", reason if self._agent is not None else f"{reason}, {unseen}")

    def _by_criu(self) -> Way:
        if self._candidate is None:
            return _closed("criu", self._process.note or _UNSEEN)
        if self._criu_path is None:
            return _closed("criu", "criu is not installed; install version 4.1 or newer")
        uid = self._families.snapshot.uid
        if uid != 0:
            return _closed("criu", f"criu needs root and hegmd runs as uid {uid}")
        refusal = self._against(CHECKPOINT)
        if refusal is not None:
            return _closed("criu", refusal)
        reason = f"{self._criu_path} can dump it once its state is off {_named(self._own)}; see hegmctl doctor"
        return _open("criu", reason)

    def _by_restart(self) -> Way:
        agent = self._process.agent
        if agent is None:
            return _closed("restart", "it has no connected agent that could save its state")
        if not agent.supervised:
            reason = "no supervisor would restart it; start the job with: hegmctl run --allow-restart -- COMMAND"
            return _closed("restart", reason)
        refusal = self._against(MIGRATE, via=RESTART)
        if refusal is not None:
            return _closed("restart", refusal)
        kept = "; a Python process is prestarted for it" if agent.kept else ""
        saved = f"its agent, {self._agent}, can save its state between two batches, for a GPU of any vendor{kept}"
        return _open("restart", saved)

    def _against(self, kind: str, via: str | None = None) -> str | None:
        if self._candidate is None:
            return self._process.note or _UNSEEN
        return self._families.against(self._candidate, PlanRequest(kind=kind, pids=(self._process.pid,), via=via))

    def _against_driver(self) -> str | None:
        """Why the driver's calls are none for these GPUs."""
        for gpu in self._own:
            if gpu.vendor == SIMULATED:
                return f"{gpu.id} is simulated and has no driver"
            if gpu.vendor != NVIDIA:
                return f"only the NVIDIA driver supports checkpoints, and {gpu.id} is a GPU of {gpu.vendor}"
        return None

    def _against_target(self) -> str | None:
        """Return why no other GPU of this node is a possible target, apart from its free memory; None if one is."""
        for gpu in self._own:
            if gpu.vendor == NVIDIA:
                for _, message, _ in driver_rules.against_moving(gpu):
                    return message
        if not self._targets():
            return f"no other GPU of this node with enough free memory has the chip of {_named(self._own)}"
        return None

    def _targets(self) -> tuple[GpuMemory, ...]:
        taken = {gpu.id for gpu in self._own}
        kinds = {(gpu.vendor, gpu.chip) for gpu in self._own}
        fit = [gpu for gpu in self._families.snapshot.gpus if gpu.state == "ok" and gpu.condition != GONE]
        whole = [gpu for gpu in fit if not gpu.mig and not gpu.mps]
        return tuple([gpu for gpu in whole if gpu.id not in taken and (gpu.vendor, gpu.chip) in kinds])


def _open(way: str, reason: str) -> Way:
    return Way(way=way, possible=True, reason=reason)


def _closed(way: str, reason: str) -> Way:
    return Way(way=way, possible=False, reason=reason)


def _named(gpus: Sequence[GpuMemory]) -> str:
    names = [gpu.id for gpu in gpus]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _either(gpus: Sequence[GpuMemory]) -> str:
    names = [gpu.id for gpu in gpus]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

"""One command for a machine with two NVIDIA GPUs: are two ranks with NCCL moved whole, each onto the other's GPU?

    PYTHONPATH=.:client python3 -m tests.gpu.nccl_run --out FILE [--budget-s N] [--agent-only] [--gib N] [KIND...]

Trainings of `training/ranked.py` (DDP, FSDP2, tensor parallel, pipelines) run under torchrun with hegmd's agent. They
exchange their GPUs, are suspended and resumed. Then the same training runs undisturbed for as many steps, and every
loss of both ranks has to equal its loss, bit for bit. A hegmd of its own does the moves.

With --agent-only there is none: this program parks both ranks, has their agents disconnect, calls the driver for both,
and has them reconnect, which proves the agent and the driver without the daemon. FILE has all results as JSON after
each step, so that a run that is cut still tells what it saw. The logs of the daemon and of the jobs are beside it, also
after SIGTERM. Without a GPU, --agent-only is a rehearsal: the ranks use gloo, and no driver is called.

Longer than 400 lines because the daemon's run and the agents' run share the trainings and their check.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from hegmctl.running import nccl_settings, prepare
from hegmd.errors import HegmError
from hegmd.gpu_helper.ready_helper import CONTEXTS, PINNED
from hegmd.protocol.messages import AgentReport, Migrate
from tests.e2e.scripted_daemon import AgentConnected, Gone, ScriptedDaemon
from tests.gpu.bench_record import huge_pages
from tests.gpu.image_run import UNPACKED, criu_settings
from tests.gpu.moves_node import ROOT, Gpus, Node, WentWrongError, until

TRAINING = Path(__file__).with_name("training") / "ranked.py"
RANKS = 2
ENDLESS_STEPS, PACE_S = 1_000_000, 0.05
# More than the contexts and caches of two runs differ by.
MAX_GROWTH_MIB = 1024
READY_WITHIN_S, STEP_WITHIN_S, ORDER_WITHIN_S, REFERENCE_WITHIN_S = 120.0, 60.0, 30.0, 300.0
# How many boundaries after the last reported one both ranks can surely stop at.
AHEAD = 25
LOCK_MS = 10_000
# The phases of an exchange in which the daemon or its helper is killed; the helper only where it has work.
KILLED_IN = {
    "daemon": (
        *("reserving", "counting", "quiescing", "measuring", "disconnecting"),
        *("locking", "checkpointing", "restoring", "reloading", "releasing"),
    ),
    "helper": ("reserving", "disconnecting", "checkpointing", "restoring", "reloading"),
}
KINDS = {
    "ddp": ("ddp",),
    "ddp-views": ("ddp", "views"),
    "ddp-times": ("ddp", "times"),
    "fsdp": ("fsdp",),
    "ddp-groups": ("ddp", "groups"),
    "ddp-device-id": ("ddp", "device-id", "groups"),
    "ddp-evaluates": ("ddp", "evaluates", "both"),
    "tensor": ("tensor", "groups"),
    "pipeline": ("pipeline",),
    "pipeline-fed": ("pipeline", "fed", "both"),
}
Result = dict[str, Any]


class Results:
    """The results, written after each step."""

    def __init__(self, path: Path, began: float) -> None:
        self._path, self._began = path, began
        self.steps: list[Result] = []
        self.facts: Result = {}

    def note(self, kind: str, step: str, **facts: Any) -> None:
        at_s = round(time.monotonic() - self._began, 1)
        self.steps.append({"kind": kind, "step": step, "at_s": at_s, **facts})
        self.write()
        print(f"{at_s:7.1f} s  {kind:14} {step:12} {json.dumps(facts)[:900]}", flush=True)

    def say(self, text: str, *, keep: bool = True) -> None:
        """Print a sentence; with `keep` it is among the facts."""
        print(text, flush=True)
        if keep:
            self.facts.setdefault("notes", []).append(text)

    def write(self) -> None:
        beside = self._path.with_suffix(".writing")
        beside.write_text(json.dumps({"facts": self.facts, "steps": self.steps}, indent=1))
        beside.replace(self._path)

    def of(self, kind: str) -> list[Result]:
        return [step for step in self.steps if step["kind"] == kind]

    @property
    def wrong(self) -> list[Result]:
        return [step for step in self.steps if step.get("wrong")]


class RankedJob:
    """torchrun with two ranks. Each rank writes to a file of its own. It pauses after each step if it is endless."""

    def __init__(
        self,
        name: str,
        folder: Path,
        options: argparse.Namespace,
        environ: dict[str, str],
        run: list[str],
        steps: int = ENDLESS_STEPS,
    ) -> None:
        self.path = folder / name
        #: True once it came back from an image: then it is no child of this program.
        self.is_restored = False
        #: The memory of each rank on each GPU, once it was measured.
        self.memory_mib: list[dict[int, float]] = []
        kind, *traits = KINDS[name.partition("@")[0]]
        pace = [f"pace={options.pace_s}"] if steps == ENDLESS_STEPS else []
        words = [str(TRAINING), kind, str(steps), str(options.gib), str(self.path), *traits, *pace]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        self._errors = (folder / f"{name}.log").open("w+")
        self.process = subprocess.Popen(
            [*run, *launcher, *words],
            env={**environ, "OMP_NUM_THREADS": "2", **({"LD_PRELOAD": options.nccl} if options.nccl else {})},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def lines(self, rank: int) -> list[str]:
        """The losses of a rank so far."""
        return self._lines(rank)[1:]

    def pids(self) -> list[int]:
        return [int(self._lines(rank)[0]) for rank in range(RANKS)]

    def _lines(self, rank: int) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return Path(f"{self.path}.{rank}").read_text().splitlines(keepends=True)
        return []

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None and not self.is_restored

    def steps(self) -> int:
        """Return the number of steps that all ranks have reported."""
        return min(len([line for line in self.lines(rank) if line.endswith("\n")]) for rank in range(RANKS))

    def wait_for(self, steps: int, within_s: float) -> None:
        def there() -> bool:
            if self.has_ended and self.steps() < steps:
                raise WentWrongError(f"torchrun ended with {self.process.returncode}: {self.error_text()}")
            return self.steps() >= steps

        until(there, f"step {steps} of {self.path.name} (now {self.steps()})", within_s)

    def error_text(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:]

    def train_on(self, more: int) -> int:
        """Wait for so many more steps, and return the number of all. Raises WentWrongError."""
        self.wait_for(self.steps() + more, STEP_WITHIN_S)
        return self.steps()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in self.pids() if self._lines(0) and self._lines(RANKS - 1) else ():
            with contextlib.suppress(ProcessLookupError):  # torchrun gives each rank a session of its own
                os.kill(pid, signal.SIGKILL)
        self._errors.close()


def in_parallel(call: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(call, items))


class Driver:
    """The driver's calls for all ranks, by the helper's binding; without a GPU it does nothing."""

    def __init__(self) -> None:
        self.uuids: list[str] = []
        if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
            return
        from hegmd.gpu_helper import cuda

        cuda.start()
        self._cuda = cuda
        self.uuids = [device.uuid for device in cuda.devices()]

    def exchange(self, pids: list[int]) -> dict[str, float]:
        """Lock all, then checkpoint all, restore each on the other's GPU, and unlock all; seconds of each."""
        if not self.uuids:
            return {}
        first, second = self.uuids[:2]
        cuda, pairs = self._cuda, [(first, second), (second, first)]
        steps: list[tuple[str, Callable[[int], None]]] = [
            ("lock", lambda pid: cuda.lock(pid, LOCK_MS)),
            ("checkpoint", cuda.checkpoint),
            ("restore", lambda pid: cuda.restore(pid, pairs)),
            ("unlock", cuda.unlock),
        ]
        took_s: dict[str, float] = {}
        for name, call in steps:
            began = time.monotonic()
            in_parallel(call, pids)
            took_s[f"{name}_s"] = round(time.monotonic() - began, 3)
        return took_s


class AgentsAlone:
    """Two agents, the driver, and this program in the daemon's place."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace, results: Results) -> None:
        self._name, self._options, self._results = name, options, results
        self.job: RankedJob | None = None
        self._folder = folder
        self._generation = 0

    def run(self, held: ExitStack) -> None:
        daemon = held.enter_context(ScriptedDaemon(self._folder / f"{self._name}.sock"))
        environ = dict(os.environ)
        prepare(environ, str(daemon.path), None, None)
        environ.update(nccl_settings(None))
        self.job = job = RankedJob(self._name, self._folder, self._options, environ, [])
        held.callback(job.close)
        agents = self._agents(daemon)
        job.wait_for(20, READY_WITHIN_S)
        surveys = in_parallel(lambda agent: agent.done("survey"), agents)
        communicators = [survey.communicators for survey in surveys]
        self._results.note(
            self._name, "survey", communicators=[None if one is None else vars(one) for one in communicators]
        )
        if any(communicator is None or communicator.uncovered for communicator in communicators):
            raise WentWrongError("the agents cannot disconnect its groups")
        driver = Driver()
        for number in range(self._options.rounds):
            self._once(f"exchange {number + 1}", agents, job, driver)
        self._once("same GPUs", agents, job, None)

    def _agents(self, daemon: ScriptedDaemon) -> list[AgentConnected]:
        """Return the agent of each rank; the launcher's own process may have one as well."""
        found: dict[int, AgentConnected] = {}
        while len(found) < RANKS:
            agent = daemon.attended()
            if agent.attended is not None and agent.attended.rank is not None:
                found[agent.attended.rank] = agent
        return [found[rank] for rank in range(RANKS)]

    def _once(self, step: str, agents: list[AgentConnected], job: RankedJob, driver: Driver | None) -> None:
        self._generation += 1
        generation = self._generation

        def done(agent: AgentConnected, do: str, **more: Any) -> AgentReport:
            return agent.done(do, limit_s=ORDER_WITHIN_S, **more)

        boundaries = [survey.boundary or 0 for survey in in_parallel(lambda agent: agent.done("survey"), agents)]
        at = max(boundaries) + AHEAD
        in_parallel(lambda agent: done(agent, "park", at=at, exact=True), agents)
        marks = [time.monotonic()]
        in_parallel(lambda agent: done(agent, "disconnect"), agents)
        marks.append(time.monotonic())
        taken = driver.exchange(job.pids()) if driver is not None else {}
        marks.append(time.monotonic())
        in_parallel(lambda agent: done(agent, "reconnect", generation=generation), agents)
        marks.append(time.monotonic())
        names = ("disconnect_s", "driver_s", "reconnect_s")
        times = {name: round(later - sooner, 3) for name, sooner, later in zip(names, marks, marks[1:], strict=False)}
        steps = job.steps()
        in_parallel(lambda agent: done(agent, "release", restored=driver is not None), agents)
        job.wait_for(steps + 1, STEP_WITHIN_S)
        times["first_step_s"] = round(time.monotonic() - marks[-1], 3)
        count = job.train_on(self._options.steps_between)
        self._results.note(self._name, step, **times, **taken, steps=count, memory_mib=memory_of(job))


def memory_of(job: RankedJob) -> list[dict[int, float]]:
    """Return the memory of each rank on each GPU, by NVML."""
    with contextlib.suppress(SystemExit):
        account = Gpus().account()
        return [account.places(pid) for pid in job.pids()]
    return []


class OwnDaemon:
    """A hegmd of its own, and commands."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace, results: Results) -> None:
        self._name, self._options, self._results = name, options, results
        self.job: RankedJob | None = None
        self._folder = node_folder(folder, name)
        self._folder.mkdir()

    def run(self, held: ExitStack) -> None:
        ready = f"ready_bytes = {self._options.ready_gib << 30}\n"  # among the settings of the pool, which come first
        if self._options.ready_gib:
            ready += f'ready_helper = "{self._options.ready_helper}"\n'
        criu = criu_settings(UNPACKED if UNPACKED.exists() else None)
        node = held.enter_context(Node(self._folder, log_level="debug", settings=f"{ready}{criu}"))
        run = [sys.executable, "-m", "hegmctl", "run", "--no-daemon-start", "--"]
        self.job = job = RankedJob(self._name, self._folder.parent, self._options, node.environ(), run)
        held.callback(job.close)
        job.wait_for(20, READY_WITHIN_S)
        for pid in job.pids():
            node.wait_for_agent(pid)
        self._step(node, job, "plan", ["migrate", str(job.pids()[0]), "--to", "gpu1,gpu0", "--dry-run"], None)
        ways = [*["gpu1,gpu0", "gpu0,gpu1"] * self._options.rounds][: self._options.rounds]
        for number, to in enumerate(ways):
            on = [int(word[-1]) for word in to.split(",")]
            self._step(node, job, f"exchange {number + 1}", ["migrate", str(job.pids()[0]), "--to", to], on)
        on = [int(word[-1]) for word in (ways[-1] if ways else "gpu0,gpu1").split(",")]
        self._suspend(node, job, "suspend")
        self._step(node, job, "resume", ["resume", str(job.pids()[0])], on)
        self._suspend(node, job, "suspend again")
        other = ",".join(f"gpu{gpu}" for gpu in reversed(on))
        self._step(node, job, "resume there", ["resume", str(job.pids()[0]), "--to", other], on[::-1])
        for who in filter(None, self._options.kills.split(",")):
            for phase in KILLED_IN[who]:
                self._killed(node, job, who, phase)
        if self._options.images:
            self._image(node, job, on, other)

    def _suspend(self, node: Node, job: RankedJob, step: str) -> None:
        """Suspend the ranks, into ready memory if that was asked for."""
        node.wait_until_ready()
        self._step(node, job, step, ["suspend", str(job.pids()[0])], [])

    def _killed(self, node: Node, job: RankedJob, who: str, phase: str) -> None:
        """The daemon, or its GPU helper, is killed in that phase of an exchange, which is then completed or undone."""
        began, facts = time.monotonic(), dict[str, Any]()
        try:
            before = [node.gpu_of(pid) for pid in job.pids()]
            to = ",".join(f"gpu{gpu}" for gpu in reversed(before))
            reply = node.ask(Migrate(pids=(job.pids()[0],), to=to, wait=False))
            assert reply.operation is not None
            facts["in"] = node.reach(reply.operation.id, phase)
            if who == "daemon":
                node.kill()
                node.start()
            elif helper := node.helper_pid():
                os.kill(helper, signal.SIGKILL)
            ended = node.rest(reply.operation.id)
            facts.update(phase=ended.phase, failure=ended.failure and ended.failure.message)
            if ended.phase not in {"done", "rolled-back", "cancelled"}:
                raise WentWrongError(f"after a kill of the {who} in {phase} the operation is {ended.phase}")
            on = before[::-1] if ended.phase == "done" else before
            if (now := [node.gpu_of(pid) for pid in job.pids()]) != on:
                raise WentWrongError(f"the ranks are on {now} and not on {on}")
            facts["steps"] = job.train_on(self._options.steps_between)
            for pid in job.pids():
                node.wait_for_agent(pid)
        except (WentWrongError, HegmError) as error:
            facts.update(wrong=str(error)[:1500], log=node.log_tail(60).splitlines())
        self._results.note(self._name, f"kill {who}", took_s=round(time.monotonic() - began, 1), **facts)
        if job.has_ended:
            raise WentWrongError(f"the job is gone: {job.error_text()}")

    def _image(self, node: Node, job: RankedJob, on: list[int], other: str) -> None:
        """Into an image, which ends the job, and back from it onto the exchanged GPUs."""
        path = str(self._folder / "image")
        job.is_restored = True
        self._step(node, job, "checkpoint", ["checkpoint", str(job.pids()[0]), path], None)
        job.process.wait(STEP_WITHIN_S)
        to = ",".join(f"gpu{gpu}" for gpu in on)
        self._step(node, job, "restore", ["restore", path, "--to", to], on)
        self._step(node, job, "exchange after", ["migrate", str(job.pids()[0]), "--to", other], on[::-1])

    def _step(self, node: Node, job: RankedJob, step: str, words: list[str], on: list[int] | None) -> None:
        """Run one command and its check. A failure is recorded, and the next step runs."""
        began = time.monotonic()
        facts: Result = {}
        try:
            answer = node.hegmctl(*words)
            facts["took_s"] = round(time.monotonic() - began, 3)
            facts["answer"] = shortened(answer)
            if operation := answer.get("operation"):
                facts["story"] = story_times(node, operation["id"])
            if on is not None:
                places = [sorted(node.gpus.account().places(pid)) for pid in job.pids()]
                wanted = [[gpu] for gpu in on] or [[]] * RANKS
                if places != wanted:
                    raise WentWrongError(f"the ranks are on {places} and not on {wanted}")
            if on:
                facts["steps"] = job.train_on(self._options.steps_between)
                facts["memory_mib"] = memory_of(job)
        except (WentWrongError, HegmError, subprocess.TimeoutExpired) as error:
            facts["wrong"] = str(error)[:1500]
            facts["log"] = node.log_tail(40).splitlines()
            facts["job"] = job.error_text()[-1500:].splitlines()
        self._results.note(self._name, step, **facts)
        if job.has_ended:
            raise WentWrongError(f"the job is gone: {job.error_text()}")


def shortened(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the relevant fields of an operation; a plan in full."""
    operation = answer.get("operation") or {}
    wanted = ("id", "phase", "downtime_s", "failure", "waits", "took_s")
    short = {name: operation[name] for name in wanted if operation.get(name) is not None}
    return short or answer


def story_times(node: Node, op_id: str) -> list[str]:
    """Each event of an operation with the seconds since its beginning."""
    lines = node.story(op_id).story
    return [f"{line.utc - lines[0].utc:.3f} {line.event or 'planned'} {line.phase}" for line in lines]


def node_folder(folder: Path, name: str) -> Path:
    return folder / f"node-{name}"


def compare(
    losses: list[list[str]], wanted: list[list[str]], memory_mib: list[dict[int, float]], steps: list[Result]
) -> None:
    """Judge each step after which the job trained on: by its ranks' losses until then, and by the memory of each.

    `wanted` and `memory_mib` are those of the undisturbed run.
    """
    had = max([sum(places.values()) for places in memory_mib], default=0.0)
    for step in steps:
        count = step["steps"]
        for rank, (own, alone) in enumerate(zip(losses, wanted, strict=True)):
            differs = [number for number in range(count) if own[number : number + 1] != alone[number : number + 1]]
            if differs:
                found, expected = ("".join(lines[differs[0] : differs[0] + 1]).strip() for lines in (own, alone))
                step.setdefault("wrong", f"rank {rank} step {differs[0]}: {found or None} and not {expected or None}")
        if "wrong" not in step:
            step["losses_equal"] = count
        # A rank has no more memory on its GPU than one that was never moved: its agent has kept no storages.
        has = max([sum(places.values()) for places in step.get("memory_mib", [])], default=0.0)
        if had and has - had > MAX_GROWTH_MIB:
            step.setdefault("wrong", f"a rank has {has:g} MiB on its GPU, and {had:g} if it is not moved")


def run_undisturbed(name: str, folder: Path, options: argparse.Namespace, job: RankedJob, results: Results) -> None:
    """Run the training alone for as many steps as the job made, and compare. Raises WentWrongError."""
    plain = {**os.environ, **nccl_settings(None), "PYTHONPATH": ""}
    count = job.steps()
    with closing(RankedJob(f"{name}@alone", folder, options, plain, [], count)) as reference:
        reference.wait_for(count // 2, REFERENCE_WITHIN_S)
        reference.memory_mib = memory_of(reference)
        reference.wait_for(count, REFERENCE_WITHIN_S)
        reference.process.wait(READY_WITHIN_S)
        losses, wanted = ([one.lines(rank) for rank in range(RANKS)] for one in (job, reference))
        compare(losses, wanted, reference.memory_mib, [step for step in results.of(name) if "steps" in step])
        results.note(name, "reference", made=count, memory_mib=reference.memory_mib)


def go_through(options: argparse.Namespace, results: Results, folder: Path) -> Iterator[str]:
    """Each kind in turn; the names of those that are left when the time is over."""
    ends = time.monotonic() + options.budget_s
    for name in options.kinds:
        if time.monotonic() > ends:
            yield name
            continue
        run = (AgentsAlone if options.agent_only else OwnDaemon)(name, folder, options, results)
        try:
            with noting_failures(name, folder, results), ExitStack() as held:
                run.run(held)
            with noting_failures(f"{name}@alone", folder, results):
                if run.job is not None and run.job.steps():
                    run_undisturbed(name, folder, options, run.job, results)
        finally:
            save_logs(name, folder, options.out)


@contextlib.contextmanager
def noting_failures(name: str, folder: Path, results: Results) -> Iterator[None]:
    """Record what is raised, with the end of that job's log."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the next kind is worth its time on such a machine
        traceback.print_exc()
        problem = type(error).__name__ if isinstance(error, Gone) else f"{type(error).__name__}: {error}"
        log = folder / f"{name}.log"
        output = log.read_text(errors="replace")[-3000:].splitlines() if log.exists() else []
        results.note(name, "failed", wrong=problem[:1500], job=output)


def save_logs(name: str, folder: Path, out: Path) -> None:
    """Keep the logs of the daemon, the job and its undisturbed run beside the results."""
    for log, suffix in (
        (node_folder(folder, name) / "hegmd.log", f".{name}.log"),
        (folder / f"{name}.log", f".{name}.job.log"),
        (folder / f"{name}@alone.log", f".{name}.alone.log"),
    ):
        if log.exists():
            shutil.copyfile(log, out.with_suffix(suffix))


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=["ddp", "fsdp"], help=f"of {', '.join(KINDS)}")
    parser.add_argument("--out", type=Path, required=True, help="the file of JSON with all results")
    parser.add_argument("--budget-s", type=float, default=240.0, help="begin no training after so long")
    parser.add_argument("--agent-only", action="store_true", help="without a hegmd")
    parser.add_argument("--gib", type=float, default=1.0, help="weights, gradients and moments of each rank")
    parser.add_argument(
        "--ready-gib", type=int, default=0, help="ready memory of the pool, on huge pages, for suspends"
    )
    parser.add_argument("--kills", default="", metavar="WHO", help="kill the daemon, helper or both in each phase")
    parser.add_argument("--images", action="store_true", help="into an image and back as well; takes CRIU")
    parser.add_argument("--nccl", metavar="FILE", help="a libnccl.so.2 that the trainings use instead of PyTorch's")
    parser.add_argument("--ready-helper", choices=(CONTEXTS, PINNED), default=PINNED, help="with ready memory")
    parser.add_argument("--rounds", type=int, default=4, help="so many exchanges of each kind")
    parser.add_argument("--steps-between", type=int, default=20, help="least steps after each command")
    parser.add_argument("--pace-s", type=float, default=PACE_S, help="pause after each step of the job that is moved")
    options = parser.parse_args(argv)
    if wrong := [who for who in filter(None, options.kills.split(",")) if who not in KILLED_IN]:
        parser.error(f"nobody kills {', '.join(wrong)}; write daemon, helper or both")
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        parser.error(f"there is no kind {', '.join(unknown)}; write some of {', '.join(KINDS)}")
    return options


def main(argv: list[str]) -> int:
    options = parsed(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # all processes end, and logs are kept
    results = Results(options.out, time.monotonic())
    results.facts = {
        "mode": "agent-only" if options.agent_only else "daemon",
        "gib": options.gib,
        "python": sys.version,
    }
    results.write()
    with huge_pages(results, options.ready_gib), tempfile.TemporaryDirectory(prefix="hegm-nccl-") as made:
        left = list(go_through(options, results, Path(made)))
    results.facts["left"] = left
    results.write()
    print(f"{len(results.steps)} steps, {len(results.wrong)} wrong, not run: {' '.join(left) or '-'}")
    return bool(results.wrong or left)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

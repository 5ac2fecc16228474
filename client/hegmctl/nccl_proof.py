"""`hegmctl doctor --nccl`: moves a throwaway job of two ranks, so that no real job is the first to try a combination.

The job goes through the whole cycle: its ranks exchange their GPUs, are suspended and resumed, and every loss has to be
that of an undisturbed run, bit for bit. The daemon keeps the verdict. If the job cannot run at all, for example
without PyTorch, that is an error and no verdict. Every wait has a limit, and nothing of the job is left at the end.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import ExitStack, contextmanager, suppress
from shutil import rmtree, which
from tempfile import mkdtemp
from time import monotonic

from hegmctl.answers import NcclAnswer, NcclStep
from hegmctl.attaching import children_of
from hegmctl.running import gpus_asked, nccl_settings, place, prepare, visible
from hegmd.errors import (
    ATTENTION,
    BUSY,
    DENIED,
    DISCONNECTED,
    EXTERNAL,
    NOT_FOUND,
    REFUSED,
    UNAVAILABLE,
    HegmError,
    Refused,
)
from hegmd.protocol.messages import BeginProof, EndProof, OperationReply, Proof
from hegmd.protocol.proofs import FAILED, PROVEN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from hegmctl.cli import Session
    from hegmctl.connection import Connection
    from hegmctl.tables import Style
    from hegmd.protocol.operations import Operation, OperationProgress
    from hegmd.protocol.snapshots import Gpu

RANKS = 2
#: Two ranks import PyTorch and connect; a step; an operation.
READY_WITHIN_S, STEPS_WITHIN_S, OPERATION_WITHIN_S = 240.0, 60.0, 180.0
MORE_STEPS = 20
_POLL_INTERVAL_MS = 50
_HELPER = "hegmd.gpu_helper.child"
_TAIL_BYTES = 1500
# These say nothing of the job, even when its operation has begun.
_NO_VERDICT = (BUSY, DENIED, DISCONNECTED, REFUSED, UNAVAILABLE)


class MoveFailed(Exception):
    """The job was not moved as it has to be: a verdict on its combination."""


class Ranks:
    """torchrun with two ranks of `nccl_training`. Ended with the context, all processes of it."""

    def __init__(self, python: str, path: str, environ: Mapping[str, str], steps: int = 0) -> None:
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nccl_training.py")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        words = [python, *launcher, script, str(steps), path]
        self._path, self._log = path, f"{path}.log"
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        self.pids: list[int] = []
        self._below: dict[int, int] = {}  # pidfds of the launcher's descendants, by pid
        self.pid = os.posix_spawn(python, words, environ, file_actions=actions, setsid=True)
        self._pidfd = os.pidfd_open(self.pid)

    def losses(self) -> list[list[str]]:
        """Return what each rank has printed so far, complete lines only."""
        return [_lines(f"{self._path}.{rank}") for rank in range(RANKS)]

    def wait_for_steps(self, count: int, within_s: float) -> None:
        """Wait until all ranks have made that many steps. Raises MoveFailed."""
        until = monotonic() + within_s
        while min(map(len, self.losses())) < count:
            self._hold_descendants()
            if self._has_ended():
                raise MoveFailed(f"the job ended at step {min(map(len, self.losses()))}: {self.last_words()}")
            if monotonic() > until:
                raise MoveFailed(f"the job completed no step for {within_s:g} s: {self.last_words()}")

    def end(self, within_s: float) -> int:
        """Have the ranks end, and wait for it; how many steps they made. Raises MoveFailed."""
        with open(f"{self._path}.stop", "w", encoding="ascii"):
            pass
        return self.wait(within_s)

    def wait(self, within_s: float) -> int:
        """Wait until the ranks have ended well; how many steps they made. Raises MoveFailed."""
        until = monotonic() + within_s
        while not self._has_ended():
            if monotonic() > until:
                raise MoveFailed(f"the job did not end within {within_s:g} s: {self.last_words()}")
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_status != 0:
            raise MoveFailed(f"the job failed: {self.last_words()}")
        return min(map(len, self.losses()))

    def last_words(self) -> str:
        """Return the last line with content."""
        try:
            with open(self._log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip(" =-")]
        except OSError:
            lines = []
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it printed nothing"])[-1].strip()

    def _has_ended(self) -> bool:
        """Return True if the launcher has ended; waits a moment for it."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(_POLL_INTERVAL_MS))

    def _hold_descendants(self) -> None:
        """Open pidfds of the launcher's descendants, so that `close` kills no other processes."""
        parents = [self.pid]
        for parent in parents:
            for pid in children_of(parent):
                parents.append(pid)
                if pid not in self._below:
                    with suppress(ProcessLookupError):
                        pidfd = os.pidfd_open(pid)
                        self._below[pid] = pidfd
                        if pid not in children_of(parent):  # it has ended, and its pid may be another's
                            os.close(self._below.pop(pid))

    def close(self) -> None:
        """Kill the remaining processes. torchrun gives each rank a session of its own."""
        os.killpg(self.pid, signal.SIGSTOP)  # it starts nothing meanwhile; its pid is kept until it is waited for
        self._hold_descendants()
        os.killpg(self.pid, signal.SIGKILL)
        for pidfd in self._below.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return [line for line in file if line.endswith("\n")]
    except OSError:
        return []


def prove(session: Session) -> int:
    """Try the combination of this node and that Python; 0 if it is proven."""
    python = _python(session.arguments.text("python"))
    with session.connect(OPERATION_WITHIN_S) as connection:
        you = connection.welcome.you
        if not you.may_act_on_all:
            message = f"the verdict is for all users of the node, and you are uid {you.uid}"
            raise HegmError(DENIED, message, "run it with sudo: sudo hegmctl doctor --nccl")
        gpus = _two_gpus(connection, gpus_asked(session.arguments.text("gpu")))
        with _folder() as folder:
            trial = _Trial(session, connection, python, gpus, folder)
            proof = trial.run()
        answer = NcclAnswer(
            gpus=tuple(gpu.id for gpu in gpus),
            python=python,
            proof=proof,
            steps=tuple(trial.steps),
            losses=trial.losses,
        )
    session.sink.answer(answer, _text)
    return 0 if proof.verdict == PROVEN else ATTENTION.exit_status


class _Trial:
    """A throwaway job, from its start to the verdict."""

    def __init__(self, session: Session, connection: Connection, python: str, gpus: Sequence[Gpu], folder: str) -> None:
        self._sink, self._connection, self._python, self._folder = session.sink, connection, python, folder
        self._gpus = [gpu.id for gpu in gpus]
        self._environ = dict(os.environ)
        self._environ.update(nccl_settings(None))
        self._environ.setdefault("OMP_NUM_THREADS", "1")
        place(self._environ, visible(self._gpus, gpus))
        self.steps: list[NcclStep] = []
        self.losses = 0

    def run(self) -> Proof:
        """Run the trial and let the daemon store the verdict. Raises HegmError without one."""
        environ = dict(self._environ)
        prepare(environ, self._connection.endpoint.path, "doctor-nccl", None)
        with ExitStack() as held:
            job = Ranks(self._python, f"{self._folder}/moved", environ)
            held.callback(job.close)
            self._sink.note(f"starting two ranks on {' and '.join(self._gpus)} with {self._python}")
            try:
                job.wait_for_steps(MORE_STEPS, READY_WITHIN_S)
            except MoveFailed as failure:
                hint = "name a Python with PyTorch for these GPUs: hegmctl doctor --nccl --python PYTHON"
                raise HegmError(EXTERNAL, f"the throwaway job did not start: {failure}", hint) from failure
            job.pids = self._find_ranks(environ["HEGM_RUN"])
            begun = self._connection.call(BeginProof(pid=job.pids[0]), Proof)
            try:
                self._run_cycle(job)
            except MoveFailed as failure:
                proof = begun.replace(verdict=FAILED, detail=str(failure))
            else:
                proof = begun.replace(verdict=PROVEN)
        return self._connection.call(EndProof(proof=proof), Proof)

    def _find_ranks(self, run: str) -> list[int]:
        """Return the pids of the ranks in order, once the daemon reports all on a GPU."""
        until = monotonic() + READY_WITHIN_S
        while monotonic() < until:
            agents = {one.pid: one.agent for one in self._connection.processes().processes if one.gpus and one.agent}
            ranks = {agent.rank: pid for pid, agent in agents.items() if agent.run == run and agent.rank is not None}
            if len(ranks) == RANKS:
                return [ranks[rank] for rank in range(RANKS)]
            select.poll().poll(_POLL_INTERVAL_MS)
        raise HegmError(EXTERNAL, f"the daemon saw no agent in the job within {READY_WITHIN_S:g} s", "hegmctl doctor")

    def _run_cycle(self, job: Ranks) -> None:
        """Run the whole cycle. Raises MoveFailed for a wrong result, and HegmError for a refusal."""
        first, (one, other) = job.pids[0], self._gpus
        if self._places(job) != [one, other]:  # simulated GPUs do not follow the variables of a driver
            self._operate(f"migrate to {one},{other}", job, first, to=f"{one},{other}")
        self._refuse_early(first, f"{other},{one}")
        self._operate(f"migrate to {other},{one}", job, first, to=f"{other},{one}")
        self._operate("suspend", job, first)
        self._operate(f"resume on {one},{other}", job, first, to=f"{one},{other}", is_resume=True)
        self._operate("suspend", job, first)
        self._operate("resume", job, first, is_resume=True)
        count = job.end(STEPS_WITHIN_S)
        self._sink.note(f"comparing {count} losses of each rank with those of an undisturbed run")
        self._compare(job.losses(), count)

    def _places(self, job: Ranks) -> list[str]:
        used = {one.pid: one.gpus[0].gpu for one in self._connection.processes().processes if one.gpus}
        return [used.get(pid, "") for pid in job.pids]

    def _refuse_early(self, pid: int, to: str) -> None:
        """Raise Refused for what no throwaway job has to find out, such as a driver that is known to be bad."""
        self._connection.migrate([pid], to, dry_run=True)

    def _operate(self, what: str, job: Ranks, pid: int, *, to: str | None = None, is_resume: bool = False) -> None:
        began = monotonic()
        is_suspend = to is None and not is_resume

        def ask(on_progress: Callable[[OperationProgress], object]) -> OperationReply:
            if is_suspend:
                return self._connection.suspend([pid], on_progress=on_progress)
            if is_resume:
                return self._connection.resume(pid, to, on_progress=on_progress)
            return self._connection.migrate([pid], to, on_progress=on_progress)

        operation = operation_of(what, ask)
        ended = self._judge(what, operation, "suspended" if is_suspend else "done")
        if not is_suspend:
            job.wait_for_steps(min(map(len, job.losses())) + MORE_STEPS, STEPS_WITHIN_S)
        step = NcclStep(step=what, took_s=round(monotonic() - began, 3), downtime_s=ended.downtime_s)
        self.steps.append(step)
        self._sink.note(f"{what}: {step.took_s:.1f} s")

    @staticmethod
    def _judge(what: str, operation: Operation | None, phase: str) -> Operation:
        if operation is None or operation.phase != phase:
            why = (
                "no operation" if operation is None else f"{operation.phase}: {operation.failure or 'no reason given'}"
            )
            raise MoveFailed(f"{what} ended as {why}")
        return operation

    def _compare(self, moved: list[list[str]], count: int) -> None:
        """Raise MoveFailed unless all losses are those of an undisturbed run on the same GPUs."""
        alone = Ranks(self._python, f"{self._folder}/alone", {**self._environ, "USE_LIBUV": "0"}, steps=count)
        try:
            alone.wait(READY_WITHIN_S + STEPS_WITHIN_S)
            expected = alone.losses()
        finally:
            alone.close()
        compare(moved, expected, count)
        self.losses = count * RANKS


def operation_of(what: str, ask: Callable[[Callable[[OperationProgress], object]], OperationReply]) -> Operation | None:
    """Return the requested operation. Raises MoveFailed if it failed, and HegmError if it was refused."""
    begun: list[OperationProgress] = []
    try:
        return ask(begun.append).operation
    except HegmError as error:
        if not begun or error.code in _NO_VERDICT:
            raise
        raise MoveFailed(f"{what}: {error.message}") from error


def compare(moved: Sequence[Sequence[str]], expected: Sequence[Sequence[str]], count: int) -> None:
    """Raise MoveFailed at the first loss that differs, among `count` losses of each rank."""
    for rank, (losses, expected_losses) in enumerate(zip(moved, expected, strict=True)):
        for step in range(count):
            if losses[step] != expected_losses[step]:
                raise MoveFailed(f"rank {rank} has another loss at step {step + 1} than an undisturbed run")


def _two_gpus(connection: Connection, asked: Sequence[str]) -> list[Gpu]:
    """Return the named GPUs, or two unused ones of one chip. Raises HegmError."""
    known = {gpu.id: gpu for gpu in connection.gpus().gpus}
    if asked:
        visible(asked, list(known.values()))  # it knows what to say of names that are none
        found = [known[name] for name in asked if name in known]
        if len(found) != RANKS:
            raise Refused(f"the throwaway job needs two GPUs, and {len(asked)} are named", "--gpu gpu0,gpu1")
        return found
    # The daemon's own helper has a context on each GPU once it has moved a job there.
    others = [one for one in connection.processes().processes if _HELPER not in (one.command or "")]
    used = {use.gpu for process in others for use in process.gpus}
    free = [gpu for gpu in known.values() if gpu.state == "ok" and gpu.id not in used]
    for index, gpu in enumerate(free):
        for other in free[index + 1 :]:
            if gpu.chip == other.chip:
                return [gpu, other]
    chips = [gpu.chip for gpu in known.values() if gpu.state == "ok"]
    if not any(chips.count(chip) >= RANKS for chip in chips):
        there = ", ".join(known) or "no GPU"
        message = f"the throwaway job needs two GPUs of one chip, and this node has {there}"
        hint = "prove it on a node with two GPUs; a job of one process needs no proof"
        raise HegmError(REFUSED, message, hint)
    names = ", ".join(gpu.id for gpu in free) or "none"
    hint = "wait for free GPUs, or name two with free memory: hegmctl doctor --nccl --gpu gpu0,gpu1"
    raise HegmError(REFUSED, f"the throwaway job needs two free GPUs of one chip; free: {names}", hint)


def _python(named: str | None) -> str:
    """Return the Python with the PyTorch to try. Raises NOT_FOUND."""
    if named is not None:
        found = which(named)
    else:
        own = os.environ.get("VIRTUAL_ENV")
        found = (which("python3", path=os.path.join(own, "bin")) if own else None) or which("python3") or sys.executable
    if found is None:
        raise HegmError(NOT_FOUND, f"{named} is not a program", "name the Python of your trainings with --python")
    return os.path.abspath(found)


@contextmanager
def _folder() -> Generator[str]:
    folder = mkdtemp(prefix="hegm-nccl-")
    try:
        yield folder
    finally:
        rmtree(folder, ignore_errors=True)


def _text(answer: NcclAnswer, _style: Style) -> list[str]:
    combination = answer.proof.combination
    library = combination.library
    parts = (
        f"driver {combination.driver}",
        f"NCCL {library}" if library[:1].isdigit() else library,
        f"PyTorch {combination.framework_version}",
        f"chip {combination.chip}",
        f"links {combination.links}",
    )
    lines = [f"{answer.proof.verdict}: {', '.join(parts)}"]
    lines += [f"  {step.step}: {step.took_s:.2f} s" for step in answer.steps]
    if answer.proof.verdict == FAILED:
        return [*lines, f"  {answer.proof.detail}", "jobs with this combination are refused until a proof succeeds"]
    return [*lines, f"  {answer.losses} losses equal those of an undisturbed run"]

"""`hegmctl attach`: loads the agent into trainings that were started without `hegmctl run`.

Checks every reason against it first, in /proc and in the target's runtime; until then the target is not touched. Then
its Python is asked to run `hegmd/agent/arrival.py`. After a limit the request is withdrawn.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from time import monotonic

from hegmctl.answers import AttachAnswer, AttachedProcess
from hegmctl.attach_folder import ANSWER, ASKED, SCRIPT, Folder
from hegmctl.endpoint import find_endpoint
from hegmctl.jobs_text import user_name
from hegmctl.remote_python import FIRST_VERSION, NoPython, RemotePython, gone, mapped_names, python_named_by
from hegmctl.running import inject_folder, msgpack_folder, require_name
from hegmctl.tables import printable
from hegmd.errors import ATTENTION, EXTERNAL, NOT_FOUND, TIMEOUT, USAGE, HegmError, Refused
from hegmd.protocol.messages import InspectJob, JobReply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from hegmctl.cli import Session
    from hegmctl.connection import Connection
    from hegmctl.tables import Style
    from hegmd.protocol.snapshots import AgentInfo

WITHIN_S = 30.0
# An agent looks for its daemon when it begins; a busy training has the interpreter meanwhile.
SEEN_WITHIN_S = 10.0
_POLL_INTERVAL_S = 0.02
_SLOWER = "the driver alone moves it, more slowly: hegmctl migrate {pid} --to GPU"
_OVER = "start it with the agent next time: hegmctl run -- COMMAND"


class Target:
    """The facts in /proc about a process to attach to. Raises HegmError if there is none."""

    def __init__(self, pid: int, proc_root: str = "/proc") -> None:
        self.pid, self._proc_root = pid, proc_root
        try:
            with open(f"{proc_root}/{pid}/stat", encoding="ascii", errors="replace") as file:
                self.start_ticks = int(file.read().rpartition(")")[2].split()[19])
            with open(f"{proc_root}/{pid}/status", encoding="ascii", errors="replace") as file:
                fields = dict(line.split(":", 1) for line in file if ":" in line)
        except (OSError, IndexError) as error:
            raise gone(pid) from error
        self.state = fields["State"].split()[0]
        self.tracer = int(fields["TracerPid"])
        self.uids = tuple(int(uid) for uid in fields["Uid"].split())
        self.gid = int(fields["Gid"].split()[0])

    def environ(self) -> dict[str, str]:
        """Return its initial environment; empty if it cannot be read."""
        try:
            with open(f"{self._proc_root}/{self.pid}/environ", "rb") as file:
                entries = os.fsdecode(file.read()).split("\0")
        except OSError:
            return {}
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)

    def judge(self) -> None:
        """Raise Refused for what can be seen without a look into its memory."""
        caller = os.geteuid()
        if caller and set(self.uids) != {caller}:
            message = f"process {self.pid} belongs to user {user_name(self.uids[0])}"
            raise Refused(message, f"attach to your own processes, or run: sudo hegmctl attach {self.pid}")
        if self.state in "ZX":
            raise gone(self.pid)
        if self.tracer:
            message = f"process {self.pid} is under a debugger: process {self.tracer} ({_name(self.tracer)}) traces it"
            raise Refused(message, "detach the debugger, then retry")
        if self.state in "Tt":
            raise Refused(f"process {self.pid} is stopped by a signal", f"continue it: kill -CONT {self.pid}")
        if not _is_same(f"/proc/{self.pid}/ns/mnt", "/proc/self/ns/mnt") or not _is_same(f"/proc/{self.pid}/root", "/"):
            message = f"process {self.pid} sees other files than hegmctl, as in a container"
            raise Refused(message, "run hegmctl attach inside its container")

    def judge_again(self) -> None:
        """Check the process that has the pid now, and raise HegmError unless it is still this process of this user."""
        now = Target(self.pid, self._proc_root)
        if now.start_ticks != self.start_ticks:
            raise gone(self.pid)
        if (now.uids, now.gid) != (self.uids, self.gid):
            message = f"process {self.pid} changed its user or group while hegmctl attached to it"
            raise Refused(message, f"run: hegmctl ps {self.pid}")
        now.judge()


def attach(session: Session) -> int:
    """Attach to each process that was named, or to the ranks of each launcher that was."""
    named, name = session.arguments.wholes("PID"), session.arguments.text("name")
    if not named:
        raise HegmError(USAGE, "attach needs the pid of a process that trains", "hegmctl ps lists those on GPUs")
    require_name(name)
    within_s = session.arguments.seconds("timeout") or WITHIN_S
    socket_path = os.path.abspath(find_endpoint(session.arguments.text("socket")).path)
    with session.connect() as connection:
        agents = {process.pid: process.agent for process in connection.processes().processes if process.agent}
        environ = {"HEGM_SOCKET": socket_path, "HEGM_RUN": os.urandom(8).hex()}
        targets = [(target, more) for pid in dict.fromkeys(named) for target, more in chosen(Target(pid), agents)]
        for target, _ in targets:
            target.judge()
            _require_no_agent(target.pid, target.pid in agents)
            with _opened(target):
                pass
        named_so = {} if name is None else {"HEGM_JOB": name}
        attached = [
            _attach_one(target, {**environ, **more, **named_so}, within_s, connection) for target, more in targets
        ]
    session.sink.answer(AttachAnswer(processes=tuple(attached), socket=socket_path), text_of)
    return 0 if all(one.job is not None for one in attached) else ATTENTION.exit_status


def _require_no_agent(pid: int, has_agent: bool) -> None:
    if has_agent:
        message = f"process {pid} has an agent already"
        raise Refused(message, f"move it: hegmctl migrate {pid} --to GPU")


def _opened(target: Target) -> RemotePython:
    """Return its Python runtime, which can run scripts for us. Raises Refused with the reason."""
    pid = target.pid
    named = python_named_by(pid)
    if named is not None and not any("torch" in name for name in mapped_names(pid)):
        raise _no_torch(pid)
    if named is not None and _is_older(named):
        raise _too_old(pid, named)
    try:
        python = RemotePython(pid)
    except NoPython:
        if named is None:
            raise Refused(f"process {pid} runs no CPython", "name the process that trains: hegmctl ps") from None
        raise _too_old(pid, named) from None
    try:
        version = ".".join(map(str, python.version))
        if python.version < FIRST_VERSION:
            raise _too_old(pid, version)
        if not python.is_known:
            message = f"process {pid} runs Python {version}, which this release of hegmctl does not know"
            raise Refused(message, f"upgrade hegmd; until then {_SLOWER.format(pid=pid)}")
        if not python.is_enabled():
            message = f"process {pid} was started with remote debugging disabled{_disabled_by(target)}"
            raise Refused(message, f"{_SLOWER.format(pid=pid)}; or {_OVER}")
    except BaseException:
        python.close()
        raise
    return python


def _is_older(named: str) -> bool:
    """Return True if that version in a file's name, such as 3.11, is certainly too old."""
    parts = [int(part) for part in named.split(".") if part]
    return len(parts) > 1 and tuple(parts) < FIRST_VERSION


def _too_old(pid: int, version: str) -> Refused:
    needed = ".".join(map(str, FIRST_VERSION))
    message = f"process {pid} runs Python {version}, and attaching needs CPython {needed} or later"
    return Refused(message, f"{_SLOWER.format(pid=pid)}; or {_OVER}")


def _disabled_by(target: Target) -> str:
    if "PYTHON_DISABLE_REMOTE_DEBUG" in target.environ():
        return " (PYTHON_DISABLE_REMOTE_DEBUG)"
    with suppress(OSError), open(f"/proc/{target.pid}/cmdline", "rb") as file:
        if b"disable_remote_debug" in file.read().replace(b"-", b"_"):
            return " (-X disable-remote-debug)"
    return ""


def _no_torch(pid: int) -> Refused:
    return Refused(f"process {pid} has not loaded PyTorch", "name the process that trains: hegmctl ps")


def _ranks_of(target: Target) -> list[Target]:
    """Return the ranks of a launcher such as torchrun; none for any other process."""
    if "RANK" in target.environ():
        return []
    found: list[Target] = []
    for pid in children_of(target.pid):
        with suppress(HegmError):
            child = Target(pid)
            if "RANK" in child.environ():
                found.append(child)
    return found


def chosen(target: Target, agents: Mapping[int, AgentInfo]) -> list[tuple[Target, dict[str, str]]]:
    """Return the processes to attach to for that pid, each with the variables of the run that it joins.

    Ranks of a launcher that already have an agent are left out, unless all have one: the others join their run.
    """
    ranks = _ranks_of(target)
    missing = [rank for rank in ranks if rank.pid not in agents]
    joined = next((agents[rank.pid] for rank in ranks if rank.pid in agents), None)
    if not missing or joined is None:
        return [(one, {}) for one in ranks or [target]]
    found = {"HEGM_RUN": joined.run, "HEGM_JOB": joined.job}
    return [(rank, {key: value for key, value in found.items() if value is not None}) for rank in missing]


def children_of(pid: int) -> list[int]:
    """Return the children of that process that it has not reaped."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return sorted(found)


# ---- one process ----------------------------------------------------------------------------------------------------


def _attach_one(target: Target, environ: Mapping[str, str], within_s: float, connection: Connection) -> AttachedProcess:
    until = monotonic() + within_s
    pidfd = _pidfd(target.pid)
    try:
        with _opened(target) as python:
            target.judge_again()  # the pid may have been reused before it was opened
            with Folder((target.uids[1], target.gid)) as folder:
                folder.write(SCRIPT, _script(folder.path, until, environ))
                folder.write(ASKED, "")
                answer = _answered(target.pid, ask(target.pid, pidfd, python, folder, until, within_s))
            version = ".".join(map(str, python.version))
        job = await_job(target.pid, pidfd, connection)
    finally:
        os.close(pidfd)
    return AttachedProcess(
        pid=target.pid,
        python_version=version,
        framework_version=answer["framework_version"][0],
        job=job,
        unknown=tuple(answer.get("unknown", ())),
    )


def _script(folder: str, until: float, environ: Mapping[str, str]) -> str:
    """Return the text of the agent's arrival, with its call."""
    root = os.path.dirname(os.path.dirname(inject_folder()))
    with open(f"{root}/agent/arrival.py", encoding="utf-8") as file:
        text = file.read()
    return f"{text}\n\narrive({folder!r}, {root!r}, {until!r}, {dict(environ)!r}, {msgpack_folder()!r})\n"


def ask(pid: int, pidfd: int, python: RemotePython, folder: Folder, until: float, within_s: float) -> str:
    """Let it run the script. Returns what the agent reports. Raises HegmError.

    In every case the target must not run a file from the removed directory later: another user could create it again.
    """
    try:
        python.request(f"{folder.path}/{SCRIPT}")
        return _await_answer(pid, pidfd, folder, until, within_s)
    except BaseException:
        folder.is_left = True
        with suppress(HegmError):
            is_over = _has_ended(pidfd) or folder.read(ANSWER) is not None
            folder.is_left = not (is_over or (folder.withdraw() and python.withdraw()))
        raise


def _await_answer(pid: int, pidfd: int, folder: Folder, until: float, within_s: float) -> str:
    while (text := folder.read(ANSWER)) is None:
        if _has_ended(pidfd):
            raise HegmError(EXTERNAL, f"process {pid} ended while hegmctl attached to it", _OVER)
        if monotonic() > until:
            if folder.withdraw():
                message = f"the main thread of process {pid} ran no Python code for {within_s:g} s"
                hint = (
                    f"retry between two steps, with a longer --timeout; nothing was changed; {_SLOWER.format(pid=pid)}"
                )
                raise HegmError(TIMEOUT, message, hint)
            if monotonic() > until + within_s:
                message = f"the agent did not arrive in process {pid} within {2 * within_s:g} s"
                raise HegmError(TIMEOUT, message, f"see later whether it has: hegmctl ps {pid}")
    return text


def _answered(pid: int, text: str) -> dict[str, list[str]]:
    answer: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        answer.setdefault(key, []).append(value)
    refused = answer.get("refused", [])
    if "agent" in refused:
        _require_no_agent(pid, has_agent=True)
    if "torch" in refused:
        raise _no_torch(pid)
    if "importing" in refused:
        raise Refused(f"process {pid} is importing PyTorch", "retry when it trains")
    if "framework_version" not in answer:
        why = printable(" ".join(answer.get("failed", ["it gave no reason"])))
        hint = "check that its user can read hegmd's files: hegmctl doctor"
        raise HegmError(EXTERNAL, f"the agent did not start in process {pid}: {why}", hint)
    return answer


def await_job(pid: int, pidfd: int, connection: Connection) -> str | None:
    """Return the name of its job, once the agent has reached the daemon; None if that takes too long."""
    until = monotonic() + SEEN_WITHIN_S
    while monotonic() < until and not _has_ended(pidfd):
        if any(process.pid == pid and process.agent for process in connection.processes().processes):
            try:
                return connection.call(InspectJob(job=pid), JobReply).job.name
            except HegmError as error:
                if error.code is not NOT_FOUND:  # the daemon has seen the agent, and has no job for it yet
                    raise
    return None


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise gone(pid) from error


def _has_ended(pidfd: int) -> bool:
    """Return True if the process has ended; waits a moment for it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(_POLL_INTERVAL_S * 1000))


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return True  # unreadable here: reading its memory gives the reason


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def text_of(answer: AttachAnswer, _style: Style) -> list[str]:
    lines: list[str] = []
    for one in answer.processes:
        what = f"Python {one.python_version}, PyTorch {printable(one.framework_version)}"
        lines.append(f"attached to process {one.pid} ({what})")
        if one.job is None:
            lines.append(f"  its agent has not reached the daemon: check that its user may use {answer.socket}")
        lines += [f"  not known: {printable(phrase)}" for phrase in one.unknown]
    job = answer.processes[0].job
    return lines if job is None else [*lines, f"it can be moved, but not restarted: hegmctl migrate {job} --to GPU"]

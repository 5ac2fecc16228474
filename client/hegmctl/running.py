"""`hegmctl run`: adds the agent to a command's environment and becomes that command.

With `--allow-restart` or `--slurm` it stays as the command's parent instead (`supervisor`). Otherwise only the command
remains after the exec, under the same pid, in the same process group, with the same terminal and signals. Its
environment is changed: the agent's folder comes first on PYTHONPATH, the agent's settings are in HEGM_SOCKET, HEGM_RUN,
HEGM_JOB, HEGM_GPU and HEGM_IMAGES, and `--gpu` limits the visible GPUs. If no daemon runs, one is started first. The
command is neither its parent nor its child, and it ends by itself after the last job.

Longer than 400 lines because everything before the start of the command is here.
"""

from __future__ import annotations

import os
import sys
from time import monotonic, sleep

from hegmctl.arguments import absolute
from hegmctl.endpoint import (
    SYSTEM_SOCKET,
    Endpoint,
    find_endpoint,
    is_private,
    own_socket,
    require_no_others_socket,
    require_no_stopped_unit,
)
from hegmctl.exec_command import become, require
from hegmctl.grammar.starting import NVLS, READY_WHEN
from hegmctl.recovering import recovery_asked, tell_plan
from hegmd.errors import BAD_REQUEST, DENIED, EXTERNAL, NO_DAEMON, NOT_FOUND, REFUSED, USAGE, HegmError, Refused
from hegmd.protocol.names import gpu_named

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from hegmctl.arguments import Arguments
    from hegmctl.cli import Session
    from hegmctl.connection import Connection
    from hegmctl.recovering import Recovery
    from hegmctl.restart_client import DaemonAuthority
    from hegmd.protocol.snapshots import Gpu

# `--gpu cpu` starts a job without a GPU; `--gpu auto` waits until hegmd has chosen one, and `--gpu auto:4` four.
CPU, AUTO = "cpu", "auto"
SIMULATED = "simulated"
# As a restart sets them: hegmd/migration/methods/restart.py. HIP takes an empty list for no list at all.
_VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
DAEMON_UP_WITHIN_S = 60.0
_POLL_INTERVAL_S = 0.02
_LOG_TAIL_BYTES = 2000
# The part of a long command that is sent to the daemon, which shows the first 500 characters.
MAX_WORDS, MAX_WORD_BYTES = 100, 500
# The default number of periodic images that are kept, and the shortest interval between two.
KEPT = 3
# Informs every Python of the command that it has a supervisor. If the user sets it, `hegmctl run` becomes a supervisor.
ALLOW_RESTART = "HEGM_ALLOW_RESTART"
# Makes each process of a recovered job truncate its output files, and names its supervisor.
TRUNCATE_OUTPUTS = "HEGM_TRUNCATE_OUTPUTS"
# The variables that lead a process to the state of this one start. Those of an earlier start must be removed.
OF_ONE_START = ("HEGM_STATE", "HEGM_STATE_FD", "HEGM_STATE_LOCK_FD", "HEGM_STATES", "HEGM_RESTART")
MIN_PERIOD_S = 1.0
# No node runs more ranks; a slip of the hand would start as many processes.
MAX_RANKS = 1024


def run(session: Session) -> int:
    """Become the command, or supervise it. Raises HegmError if it does not exist, or if a daemon refuses us."""
    arguments = session.arguments
    recovery = recovery_asked(arguments)
    ranks, restarts, grace_s = _kind_of_parent(arguments)
    own = dict(os.environ)
    command = arguments.tail
    if not command:
        raise HegmError(USAGE, "run needs a command", "hegmctl run python3 train.py")
    images = periodic_images(arguments)
    nccl = nccl_settings(arguments.text("nvls"))
    gpus = gpus_asked(arguments.text("gpu"), waits=arguments.whole("bytes") is not None)
    require_name(arguments.text("name"))
    require(command)
    if recovery is not None and arguments.flag("dry-run"):
        tell_plan(session, recovery)
        return 0
    if restarts:
        _require_agent(session, command)
    endpoint, run_id = find_endpoint(arguments.text("socket")), os.urandom(8).hex()
    try:
        daemon = _query_daemon(session, gpus, run_id)
    except HegmError as error:
        if error.code is not NO_DAEMON:
            raise
        if arguments.flag("no-daemon-start"):
            if gpus:
                hint = "omit --gpu, and set CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES yourself"
                raise HegmError(NO_DAEMON, f"{error.message}; only a daemon knows {', '.join(gpus)}", hint) from error
            session.sink.note(f"{error.message}; the job runs, and its agent connects once a daemon runs")
            daemon = RunTarget(gpus, {}, arguments.text("name"))
        else:
            endpoint = _start_daemon(endpoint, arguments.text("simulate"))
            session.sink.note(f"started hegmd at {endpoint.path} for this job")
            daemon = _query_daemon(session, gpus, run_id, endpoint.path)
    prepare(os.environ, endpoint.path, daemon.name, ",".join(daemon.gpus) or None, images, run_id=run_id)
    for variable, value in nccl.items():
        os.environ.setdefault(variable, value)
    for note in place(os.environ, daemon.visible):
        session.sink.note(note)
    if ranks is not None:
        return _launch(session, endpoint.path, command, ranks)
    if not restarts:
        os.environ.pop(ALLOW_RESTART, None)
        if grace_s is None:
            become(command)
    path = absolute(endpoint.path)
    authority = _authority(session, path, command, daemon.gpus, recovery) if restarts else None
    return _stay_with(session, authority, command, None if grace_s is None else (daemon.job, path, own, grace_s))


def _kind_of_parent(arguments: Arguments) -> tuple[int | None, bool, float | None]:
    """Return how many ranks it starts, whether it may be restarted, and Slurm's grace time. Raises HegmError."""
    ranks, restarts, grace_s = arguments.whole("ranks"), _is_supervised(arguments), None
    if arguments.flag("slurm"):
        from hegmctl.slurm import grace_s as grace_of

        grace_s = grace_of(os.environ)
    if ranks is not None and (restarts or grace_s is not None):
        hint = "omit --recover, --allow-restart and --slurm: the ranks recover by themselves"
        raise HegmError(USAGE, "--ranks cannot be combined with --recover, --allow-restart or --slurm", hint)
    if ranks is not None and ranks > MAX_RANKS:
        raise HegmError(USAGE, f"--ranks {ranks}: at most {MAX_RANKS} ranks run on a node", "write a lower number")
    return ranks, restarts, grace_s


def require_name(name: str | None) -> None:
    """Raise USAGE if no job can have that name."""
    from hegmd.protocol.names import why_no_name

    if name is None:
        return
    why = why_no_name(name)
    if why is not None:
        raise HegmError(USAGE, f"--name {name[:80]!r}: {why}", "choose another, such as --name train")


def _is_supervised(arguments: Arguments) -> bool:
    gpus = arguments.flag("allow-restart") or arguments.text("recover") is not None
    allowed = gpus or os.environ.get(ALLOW_RESTART, "") not in ("", "0")
    own = (arguments.whole("restart-tries"), arguments.text("resume"), arguments.text("ready"))
    if not allowed and any(value is not None for value in own):
        hint = "hegmctl run --allow-restart --resume ID -- COMMAND"
        raise HegmError(USAGE, "--restart-tries, --resume and --ready are for --allow-restart", hint)
    ready = arguments.text("ready")
    if ready not in (None, *READY_WHEN):  # the daemon would treat it like no value
        raise HegmError(USAGE, f"--ready {ready} is not a valid value", f"write one of: {', '.join(READY_WHEN)}")
    return allowed


def _require_agent(session: Session, command: Sequence[str]) -> None:
    """Check that its words do not exclude the agent. Raises Refused if it should continue from a state."""
    from hegmctl.isolation import leaves_out

    word, operation = leaves_out(command), session.arguments.text("resume")
    if word is None:
        return
    if operation is not None:
        hint = f"leave `{word}` out: hegmctl run --allow-restart --resume {operation} -- COMMAND; the state is kept"
        raise Refused(
            f"`{word}` keeps hegmd's agent out of {command[0]}: the training would start from the beginning", hint
        )
    session.sink.note(f"`{word}` keeps hegmd's agent out of {command[0]}: the job runs, but cannot be restarted")


def _authority(
    session: Session, path: str, command: Sequence[str], gpus: Sequence[str], recovery: Recovery | None
) -> DaemonAuthority:
    """Return the authority that decides about restarts: the daemon's."""
    from hegmctl.restart_client import TRIES, DaemonAuthority

    arguments = session.arguments
    os.environ[ALLOW_RESTART] = "1"
    if arguments.flag("truncate-outputs"):
        os.environ[TRUNCATE_OUTPUTS] = str(os.getpid())
    return DaemonAuthority(
        path,
        command,
        os.environ,
        say=session.sink.note,
        tries=arguments.whole("restart-tries") or TRIES,
        resumes=arguments.text("resume"),
        gpu=",".join(gpus) or None,
        ready=arguments.text("ready"),
        recovery=recovery,
    )


def _stay_with(
    session: Session,
    authority: DaemonAuthority | None,
    command: Sequence[str],
    slurm: tuple[str | None, str, Mapping[str, str], float] | None,
) -> int:
    """Be the parent of the command, which is only restarted with an authority. Return its exit status."""
    from hegmctl.output import flush
    from hegmctl.slurm import NeverRestarted, SlurmSignals
    from hegmctl.supervisor import Start, Supervisor

    flush()
    first = None if session.arguments.text("resume") is not None else Start(command, os.environ)
    signals = None if slurm is None else SlurmSignals(*slurm, session.sink.note)
    return Supervisor(authority or NeverRestarted(), session.sink.note, signals).run(first)


def _launch(session: Session, path: str, command: Sequence[str], ranks: int) -> int:
    """Be the parent of the ranks; their exit status."""
    from hegmctl.output import flush
    from hegmctl.ranks import Launcher

    os.environ.pop(ALLOW_RESTART, None)
    most = session.arguments.whole("max-recoveries")
    flush()
    launcher = Launcher(
        *(ranks, command, os.environ),
        connect=lambda limit_s: session.connect(limit_s, socket=path),
        say=session.sink.note,
        max_recoveries=most,
    )
    return launcher.run()


def periodic_images(arguments: Arguments) -> str | None:
    """Return the agent's request for periodic images; None without any. Creates their directory."""
    every_s, folder = arguments.seconds("checkpoint-every"), arguments.text("dir")
    if every_s is None:
        if folder is not None or arguments.whole("keep") is not None:
            hint = "say how often: hegmctl run --checkpoint-every 10min --dir DIR -- COMMAND"
            raise HegmError(USAGE, "--keep and --dir are for --checkpoint-every", hint)
        return None
    if every_s < MIN_PERIOD_S:
        raise HegmError(USAGE, f"every {every_s:g} s is too often", f"write at least {MIN_PERIOD_S:g}")
    if folder is None:
        hint = "name one with --dir; each image is a directory in it"
        raise HegmError(USAGE, "--checkpoint-every needs a directory for the images", hint)
    path = absolute(folder)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise HegmError(EXTERNAL, f"{path} cannot be made: {error.strerror}", "name another one with --dir") from error
    return f"{every_s:g}:{arguments.whole('keep') or KEPT}:{path}"


def nccl_settings(nvls: str | None) -> dict[str, str]:
    """How NCCL has to be set for its ranks to be moved, where the user has not set it. Raises HegmError.

    The driver's checkpoint hangs with live multicast memory (nccl#2340), and its restore fails with host memory that
    NCCL allocates by cuMem (nccl#2350).
    """
    if nvls not in (None, *NVLS):
        raise HegmError(USAGE, f"--nvls {nvls} is not a valid value", f"write one of: {', '.join(NVLS)}")
    host = {"NCCL_CUMEM_HOST_ENABLE": "0"}
    return host if nvls == "keep" else {"NCCL_NVLS_ENABLE": "0", **host}


def prepare(
    environ: MutableMapping[str, str],
    socket_path: str,
    name: str | None,
    gpu: str | None,
    images: str | None = None,
    *,
    run_id: str | None = None,
) -> None:
    """Return what the command's environment needs in addition."""
    for variable in (*OF_ONE_START, TRUNCATE_OUTPUTS):
        environ.pop(variable, None)
    before = environ.get("PYTHONPATH")
    environ["PYTHONPATH"] = inject_folder() + (os.pathsep + before if before else "")
    # For the agent in a Python without msgpack, or with an incompatible one.
    environ["HEGM_MSGPACK"] = msgpack_folder()
    environ["HEGM_SOCKET"] = absolute(socket_path)
    # A launcher's store with io_uring keeps its whole job out of every image; see hegmd/agent/dumpable_launcher.py.
    environ.setdefault("USE_LIBUV", "0")
    # Two runs are two jobs, even with the same name, and move independently. A run within a run is another job too.
    environ["HEGM_RUN"] = run_id or os.urandom(8).hex()
    for variable, value in (("HEGM_JOB", name), ("HEGM_GPU", gpu), ("HEGM_IMAGES", images)):
        environ.pop(variable, None)
        if value is not None:
            environ[variable] = value


def inject_folder() -> str:
    """Return the folder of this installation that contains only the agent's sitecustomize."""
    import hegmd

    return os.path.join(os.path.dirname(os.path.abspath(hegmd.__file__)), "agent", "inject")


def msgpack_folder() -> str:
    """The folder of the msgpack that this installation uses."""
    import msgpack

    return os.path.dirname(os.path.abspath(msgpack.__file__))


def gpus_asked(text: str | None, *, waits: bool = False) -> tuple[str, ...]:
    """Return the GPUs that `--gpu` names, in their order. Raises HegmError for an invalid list.

    A job that `waits` for free memory can have one GPU by name, or those that hegmd chooses.
    """
    if text is None:
        return (AUTO,) if waits else ()
    names = tuple(name.strip() for name in text.split(","))
    is_alone, alone = len(names) == 1, {CPU, AUTO}.intersection(name.partition(":")[0] for name in names)
    if "" in names or len(set(names)) < len(names) or (not is_alone and alone):
        hint = "write each once: --gpu gpu0,gpu1; or --gpu cpu, --gpu auto, or --gpu auto:2"
        raise HegmError(USAGE, f"--gpu {text} is not a list of GPUs", hint)
    if waits and (not is_alone or names == (CPU,)):
        hint = "write --gpu auto, --gpu auto:2, or name one GPU"
        raise HegmError(USAGE, f"--bytes is for one GPU, or for those that hegmd chooses, not for {text}", hint)
    auto_count(names[0])
    return names


def auto_count(name: str, ranks: int | None = None) -> int | None:
    """Return how many GPUs hegmd is to choose; None for a GPU by name. Each of `ranks` gets its own if none is said.

    Raises HegmError for a number that is none.
    """
    word, colon, number = name.partition(":")
    if word != AUTO:
        return None
    if not colon:
        return ranks or 1
    if not (number.isascii() and number.isdigit() and int(number[:4]) > 0 and len(number) < 4):
        raise HegmError(USAGE, f"--gpu {name} names no number of GPUs", "write a number of GPUs, such as --gpu auto:4")
    return int(number)


class RunTarget:
    """The daemon's answer: the named GPUs, the variables that show exactly these, the job's name and id."""

    __slots__ = ("gpus", "job", "name", "visible")

    def __init__(
        self, gpus: tuple[str, ...], visible: dict[str, str], name: str | None, job: str | None = None
    ) -> None:
        self.gpus = gpus
        self.visible = visible
        self.name = name
        self.job = job


def _query_daemon(session: Session, asked: tuple[str, ...], run_id: str, socket: str | None = None) -> RunTarget:
    """Check that a daemon serves us, register this process as a job, and wait for a GPU if asked. Raises HegmError."""
    size_bytes = session.arguments.whole("bytes")
    count = auto_count(asked[0], session.arguments.whole("ranks")) if asked else None
    if count is not None or size_bytes is not None:
        from hegmctl.sharing_commands import wait_for_gpus
        from hegmd.protocol.messages import PlaceJob

        with session.connect(socket=socket) as connection:
            names = _register(session, connection, run_id)
        gpu = asked[0] if count is None else AUTO
        request = PlaceJob(run=run_id, gpu=gpu, size_bytes=size_bytes, gpu_count=count or 1)
        gpus = wait_for_gpus(session, request, socket)
        with session.connect(socket=socket) as connection:
            return RunTarget(gpus, visible(gpus, connection.gpus().gpus), *names)
    with session.connect(socket=socket) as connection:
        gpus, variables = asked, dict[str, str]()
        if asked:
            known = connection.gpus().gpus
            gpus = tuple(one if one == CPU else gpu_named(one, known) for one in asked)
            if len(set(gpus)) < len(gpus):
                raise HegmError(USAGE, f"--gpu {','.join(asked)} names a GPU twice", "write each once")
            variables = visible(gpus, known)
        return RunTarget(gpus, variables, *_register(session, connection, run_id))


def _register(session: Session, connection: Connection, run_id: str) -> tuple[str | None, str | None]:
    """Have the daemon enter this process as a job; return its name and id, if it could. Raises HegmError."""
    from hegmd.protocol.messages import JobRegistered, RegisterJob

    arguments = session.arguments
    name = arguments.text("name")
    words = [os.fsencode(word)[:MAX_WORD_BYTES].decode("utf-8", "replace") for word in arguments.tail[:MAX_WORDS]]
    priority, resumes = arguments.text("priority"), arguments.text("resume")
    number = os.environ.get("SLURM_JOB_ID", "") if arguments.flag("slurm") else ""
    slurm_job = int(number) if number.isascii() and number.isdigit() and len(number) < 16 else None
    request = RegisterJob(run=run_id, name=name, command=tuple(words), resumes=resumes, priority=priority)
    request = request.replace(slurm_job=slurm_job)
    try:
        job = connection.call(request, JobRegistered)
    except HegmError as error:
        if error.code in (BAD_REQUEST, NOT_FOUND, DENIED):
            raise
        session.sink.note(f"{error.message}; the job runs, and is named once its agent connects")
        return name, None
    if name is not None and job.name != name:
        session.sink.note(f"another job is called {name}: this one is {job.name} ({job.id})")
    return job.name, job.id


def visible(gpus: Sequence[str], known: Sequence[Gpu]) -> dict[str, str]:
    """Return the variables by which a process and its children see exactly those GPUs, in that order.

    Uses UUIDs: an index counts only visible GPUs, in an order that depends on CUDA_DEVICE_ORDER. Empty on a simulated
    node, where HEGM_GPU is used. Raises HegmError for a GPU that is missing or lost.
    """
    if tuple(gpus) == (CPU,):
        return {} if all(gpu.vendor == SIMULATED for gpu in known) else dict(_NO_GPU)
    by_name = {gpu.id: gpu for gpu in known}
    found: list[Gpu] = []
    for name in gpus:
        gpu = by_name[gpu_named(name, known)]
        if gpu.state == "lost":
            others = [gpu.id for gpu in known if gpu.state == "ok"]
            hint = f"use another: {', '.join(others)}" if others else "run: hegmctl doctor"
            raise HegmError(REFUSED, f"{gpu.id} is lost: it fell off the bus", hint, {"gpu": gpu.id})
        found.append(gpu)
    vendors = {gpu.vendor for gpu in found}
    if len(vendors) > 1:
        message = f"{', '.join(gpus)} belong to several vendors: {', '.join(sorted(vendors))}"
        raise HegmError(REFUSED, message, "name GPUs of one vendor")
    variable = _VISIBLE.get(vendors.pop())
    return {} if variable is None else {variable: ",".join([gpu.uuid for gpu in found])}


def place(environ: MutableMapping[str, str], visible: Mapping[str, str]) -> list[str]:
    """Set what decides on which GPUs the command is; in words what takes the place of the caller's own variables."""
    if not visible:
        return []
    notes = [
        f"--gpu overrides {name}={environ[name]} of the environment"
        for name in (*_NO_GPU, "ROCR_VISIBLE_DEVICES")
        if environ.get(name) not in (None, visible.get(name))
    ]
    for name in (*_NO_GPU, "ROCR_VISIBLE_DEVICES"):
        environ.pop(name, None)
    environ.update(visible)
    return notes


def _start_daemon(endpoint: Endpoint, simulate: str | None) -> Endpoint:
    """Start a daemon for this process and what joins it, and wait until it listens. Raises HegmError."""
    named = endpoint.origin in ("--socket", "HEGM_SOCKET")
    path = endpoint.path if named or endpoint.path != SYSTEM_SOCKET else own_socket(os.environ)
    folder, state = os.path.dirname(path), f"{path}.state"
    require_no_stopped_unit(path)
    require_no_others_socket(path, state)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not named and path != SYSTEM_SOCKET and not is_private(folder):
            raise HegmError(
                REFUSED,
                f"{folder} is writable for other users, who could impersonate the daemon",
                "name a socket with --socket",
            )
        log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise HegmError(
            EXTERNAL, f"{folder} cannot hold the socket of a daemon: {error.strerror}", "name a socket with --socket"
        ) from error
    words = [sys.executable, *(["-I"] if sys.flags.isolated else []), "-m", "hegmd", "--user", "--socket", path]
    words += ["--state-dir", state, "--until", str(os.getpid())]
    words += ["--simulate", simulate] if simulate else []
    try:
        pidfd = _spawn_apart(words, log)
        _await(path, pidfd, f"{path}.log")
    finally:
        os.close(log)
    return Endpoint(path, endpoint.origin)


def _spawn_apart(words: list[str], log: int) -> int:
    """Start a program in a session of its own that is not our child. Return its pidfd."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
            pid = os.posix_spawn(words[0], words, os.environ, file_actions=actions)
            os.write(write_end, str(pid).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as status:
        pid_text = status.read()
    os.waitpid(child, 0)
    try:
        return os.pidfd_open(int(pid_text))
    except (ValueError, OSError):
        raise HegmError(EXTERNAL, f"{words[0]} cannot be run", "install hegmd") from None


def _await(path: str, pidfd: int, log_path: str) -> None:
    """Wait until a daemon listens there. Raises HegmError with the end of its log if it has exited instead."""
    from select import select

    from hegmctl.wire import Wire

    deadline = monotonic() + DAEMON_UP_WITHIN_S
    try:
        while monotonic() < deadline:
            try:
                Wire.connect(path, deadline).close()
                return
            except OSError:
                if select([pidfd], [], [], 0)[0]:
                    break
                sleep(_POLL_INTERVAL_S)
    finally:
        os.close(pidfd)
    with open(log_path, "rb") as log:
        tail = log.read()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
    last = tail.splitlines()[-1] if tail else "it logged nothing"
    raise HegmError(
        EXTERNAL, f"hegmd did not start: {last}", f"read {log_path}, or run without a daemon: --no-daemon-start"
    )

"""A process that is started before its turn, as both sides have it: real Pythons that import little."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmctl.prestart import LOCK_FD, OPERATION, READY_FD, STATE_FD, PrestartedProcess, PrestartSpec, make_ready
from hegmctl.rank_states import STATES
from hegmctl.running import inject_folder, msgpack_folder
from hegmctl.supervisor import NOT_ITS_TURN_STATUS
from tests.patience import HANG_S
from tests.stubs.cuda.node import CudaNode

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]
PTRACE_SEIZE = 0x4206
PATIENCE_S = HANG_S
SCRIPT = """
import os, sys
seen = "torch" in sys.modules, READY in os.environ, os.environ.get("HEGM_RESTART")
from torch import was_told as seen_by_its_imports
import torch, torch.inner
from torch import made
state = os.pread(int(os.environ["HEGM_STATE_FD"]), 99, 0)
os.write(3, repr((*seen, seen_by_its_imports, made, torch is sys.modules["torch"], state, torch.inner.made)).encode())
"""


@pytest.fixture(autouse=True)
def without_signals() -> Iterator[None]:
    """Block SIGIO: a supervisor also gets it for each message, and it would end a process that has not blocked it."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGIO, before)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Write a script that reports what it sees of a stub PyTorch, which counts its imports."""
    (tmp_path / "lib/torch").mkdir(parents=True)
    counts = "import builtins\nmade = builtins.counted = getattr(builtins, 'counted', 0) + 1\n"
    checks_variable = f"import os\nwas_told = {READY_FD!r} in os.environ\n"
    (tmp_path / "lib/torch/__init__.py").write_text(counts + checks_variable)
    (tmp_path / "lib/torch/inner.py").write_text(counts + "import warnings\nwarnings.warn('heard by nobody')\n")
    path = tmp_path / "script/train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT.replace("READY", repr(READY_FD)))
    return path


class PrestartCase:
    """The process to prestart for that script. The script reports through descriptor 3."""

    def __init__(self, script: Path, *, inject: str | None = None, shadow: str | None = None) -> None:
        library = script.parents[1] / "lib"
        paths = os.pathsep.join((inject_folder() if inject is None else inject, str(library)))
        self.environ = {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "HEGM_MSGPACK": msgpack_folder()}
        self.environ["HEGM_SOCKET"] = str(library / "nobody")
        if shadow is not None:
            (script.parent / shadow).write_text("raise SystemExit(3)\n")
        self.command = ("sh", "-c", f"exec 3>{script.parents[1]}/said; exec {shlex.quote(sys.executable)} {script}")
        self.log = script.parents[1] / "said"
        self.path = [str(script.parent), str(library), *sys.path]

    def expected(self) -> PrestartSpec:
        return PrestartSpec(self.command, self.environ, ("torch", "torch.inner", "torch.missing"), self.path)

    def start(self, state: int, **more: str) -> tuple[tuple[str, ...], dict[str, str]]:
        own = {STATE_FD: str(state), LOCK_FD: str(state), OPERATION: "4"}
        return self.command, {**self.environ, **own, **more}


def made_ready(what: PrestartSpec) -> PrestartedProcess:
    readied = make_ready(what, set())
    assert readied is not None
    heard_of(readied)
    return readied


def heard_of(readied: PrestartedProcess) -> None:
    """Wait until the process has reported or ended."""
    poll = select.poll()
    assert readied._line is not None
    poll.register(readied._line, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)


def end(readied: PrestartedProcess) -> None:
    """Release the process and use it."""
    readied.end()
    status_of(readied.pid)


def status_of(pid: int) -> int:
    """Return the exit status. A process that was not used immediately counts as killed."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return -signal.SIGKILL


@pytest.fixture
def state() -> Iterator[int]:
    fd = os.memfd_create("state")
    os.write(fd, b"the state")
    yield fd
    os.close(fd)


def test_it_waits_before_the_first_line_and_continues_as_the_same_start(script: Path, state: int) -> None:
    """PyTorch is hidden until the script imports it, and is then not imported again.

    Processes that PyTorch starts during its import do not wait.
    """
    known = PrestartCase(script)
    readied = made_ready(known.expected())
    wanted = known.start(state)
    assert readied.check()
    assert readied.waits
    assert not readied.check()
    assert readied.awaited_until(*wanted) is None
    assert known.log.read_text() == ""
    assert readied.activate_as(*wanted) == readied.pid
    assert os.waitpid(readied.pid, 0) == (readied.pid, 0)
    assert known.log.read_text() == repr((False, False, "4", False, 1, True, b"the state", 2))


@pytest.mark.parametrize("what", ["killed", "another environment", "ranks", "another command"])
def test_a_prestarted_process_that_cannot_become_that_start_is_ended(script: Path, state: int, what: str) -> None:
    known = PrestartCase(script)
    readied = made_ready(known.expected())
    wanted = known.start(state, **{"another environment": {"MORE": "1"}, "ranks": {STATES: "2:x"}}.get(what, {}))
    if what == "killed":
        os.kill(readied.pid, signal.SIGKILL)
        os.waitid(os.P_PID, readied.pid, os.WEXITED | os.WNOWAIT)
    if what == "another command":
        wanted = ("true",), wanted[1]
    assert readied.activate_as(*wanted) is None
    assert status_of(readied.pid) in {-signal.SIGKILL, NOT_ITS_TURN_STATUS}
    assert known.log.read_text() == ""
    readied.end()


def test_releasing_it_ends_the_wait(script: Path) -> None:
    known = PrestartCase(script)
    readied = made_ready(known.expected())
    readied.end()
    readied.end()
    assert status_of(readied.pid) in {-signal.SIGKILL, NOT_ITS_TURN_STATUS}


def test_a_supervisor_waited_for_an_unkillable_process(script: Path) -> None:
    """Like a kernel call that hangs: here a tracer holds the process and has not received its end yet."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    words = [sys.executable, "-m", "tests.unit.hegmctl.test_prestart", str(script)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert ptrace(PTRACE_SEIZE, pid, None, None) == 0, os.strerror(ctypes.get_errno())
        try:
            supervisor.stdin.write(b"end it\n")
            supervisor.stdin.flush()
            poll = select.poll()
            poll.register(supervisor.stdout, select.POLLIN)
            assert poll.poll(PATIENCE_S * 1000), "it waits for it"
        finally:
            os.waitpid(pid, 0)  # the tracer gets the signal, then the parent
        assert supervisor.stdout.readline() == b"ended\n"


def end_one_when_told(script: Path) -> None:
    """A supervisor, in a process of its own."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    readied = made_ready(PrestartCase(script).expected())
    os.write(1, b"%d\n" % readied.pid)
    sys.stdin.readline()
    readied.end()
    os.write(1, b"ended\n")
    status_of(readied.pid)


def test_a_failed_prestarted_process_ended_like_a_finished_training(script: Path, state: int) -> None:
    """It may have no descriptors but those that it has, and ended with 0: the restart was dropped for that."""
    known = PrestartCase(script)
    readied = made_ready(known.expected())
    resource.prlimit(readied.pid, resource.RLIMIT_NOFILE, (3, 3))
    assert readied.activate_as(*known.start(state)) == readied.pid
    assert status_of(readied.pid) == NOT_ITS_TURN_STATUS
    assert known.log.read_text() == ""


def test_it_exits_if_the_script_would_import_another_module(script: Path, state: int) -> None:
    """The script's folder comes first on the path, and has a module with the name of one that was imported before."""
    known = PrestartCase(script, shadow="socket.py")
    readied = made_ready(known.expected())
    assert readied.check(), "nobody is told that it is not to be waited for"
    assert not readied.waits
    assert not readied.check()
    assert readied.awaited_until(*known.start(state)) is None
    assert readied.activate_as(*known.start(state)) is None
    assert status_of(readied.pid) in {-signal.SIGKILL, NOT_ITS_TURN_STATUS}
    assert known.log.read_text() == ""


KEPT_SCRIPT = """
import os
import torch.later
names = "HEGM_GPU", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS"
seen = [os.environ.get(name) for name in names]
with open("/proc/self/oom_score_adj") as file:
    seen += [torch.made, torch.later.made, file.read().strip()]
os.write(3, repr(seen).encode())
"""
PLACED = {"HEGM_GPU": "gpu0", "CUDA_VISIBLE_DEVICES": "GPU-0", "OMP_NUM_THREADS": "2"}


@pytest.fixture
def kept(script: Path) -> PrestartCase:
    """Prestart a process long before it is needed, in another place."""
    script.write_text(KEPT_SCRIPT)
    (script.parents[1] / "lib/torch/later.py").write_text("import torch\nmade = torch.made\n")
    known = PrestartCase(script)
    known.environ.update(PLACED)
    return known


def differing(known: PrestartCase, **different: str | None) -> PrestartSpec:
    """The start that is then expected."""
    environ = {name: value for name, value in {**known.environ, **different}.items() if value is not None}
    return PrestartSpec(known.command, environ, ("torch", "torch.inner", "torch.later"), known.path)


def test_a_prestarted_process_continues_elsewhere_with_later_imports(kept: PrestartCase, state: int) -> None:
    """The process gets unread input only when it is used, and then behaves like any other process."""
    readied = made_ready(kept.expected())
    assert readied.check()
    own = Path("/proc/self/oom_score_adj").read_text().strip()
    assert Path(f"/proc/{readied.pid}/oom_score_adj").read_text() == "1000\n"
    for _ in range(2):  # as every ten minutes: the same process would be started
        assert readied.is_to_serve(kept.expected())
        heard_of(readied)
        assert readied.check()
        assert readied.waits
    what = differing(kept, HEGM_GPU=None, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="-1")
    assert readied.is_to_serve(what)
    assert not readied.waits
    assert readied.awaited_until(what.command, what.environ) is not None
    heard_of(readied)
    assert readied.check()
    assert readied.waits
    assert readied.activate_as(what.command, {**what.environ, STATE_FD: str(state)}) == readied.pid
    assert os.waitpid(readied.pid, 0) == (readied.pid, 0)
    assert kept.log.read_text() == repr([None, "", "-1", "2", 1, 1, own])


ASKED_SCRIPT = """
import os, sys
import torch.later
from _hegm.agent.state.prestart import beforehand
asked = [sorted(beforehand().modules)]
os.environ["OMP_NUM_THREADS"] = "3"
asked.append(sorted(beforehand().modules))
os.write(3, repr(asked).encode())
"""


def test_after_one_restart_on_another_gpu_no_python_was_ever_made_ready_again(
    kept: PrestartCase, script: Path, state: int
) -> None:
    """The kernel tells the environment of its start; what its turn changed was mistaken for a change by the script."""
    script.write_text(ASKED_SCRIPT)
    kept.environ["ROCR_VISIBLE_DEVICES"] = "0"
    readied = made_ready(kept.expected())
    assert readied.check()
    what = differing(kept, CUDA_VISIBLE_DEVICES="GPU-1", ROCR_VISIBLE_DEVICES=None, HIP_VISIBLE_DEVICES="-1")
    assert readied.activate_as(what.command, {**what.environ, STATE_FD: str(state)}) == readied.pid
    assert os.waitpid(readied.pid, 0) == (readied.pid, 0)
    assert kept.log.read_text() == repr([["torch", "torch.inner", "torch.later"], []])


def test_the_exit_of_a_prestarted_process_is_reported(kept: PrestartCase) -> None:
    """The next daemon would count the process as still alive."""
    readied = made_ready(kept.expected())
    assert readied.check()
    os.kill(readied.pid, signal.SIGKILL)
    heard_of(readied)
    assert readied.check()
    assert (readied.waits, readied.is_kept) == (False, False)
    assert not readied.check()
    assert status_of(readied.pid) == -signal.SIGKILL


@pytest.mark.parametrize("different", [{"OMP_NUM_THREADS": "3"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, {"X": None}])
def test_no_process_is_prestarted_if_its_imports_may_have_read_the_changed_environment(
    kept: PrestartCase, different: dict[str, str | None]
) -> None:
    kept.environ["X"] = "1"
    readied = made_ready(kept.expected())
    assert readied.check()
    assert not readied.is_to_serve(differing(kept, **different))
    end(readied)


def test_a_prestarted_process_whose_modules_changed_on_disk_ends_once_requested(
    kept: PrestartCase, script: Path
) -> None:
    """An edited module would have been another one in the process that continues than in a start as any."""
    readied = made_ready(kept.expected())
    assert readied.check()
    with (script.parents[1] / "lib/torch/inner.py").open("a") as file:
        file.write("# edited")
    assert readied.is_to_serve(kept.expected())
    heard_of(readied)
    assert readied.check()
    assert (readied.waits, readied.is_kept) == (False, True)
    end(readied)


@pytest.mark.parametrize("how", ["edited", "shadowed"])
def test_a_prestarted_process_whose_modules_changed_since_the_request_is_not_used(
    kept: PrestartCase, script: Path, state: int, how: str
) -> None:
    """A process that cannot be used is replaced by a normal start, and does not count as another attempt."""
    readied = made_ready(kept.expected())
    assert readied.check()
    changed = script.parents[1] / "lib/torch/inner.py" if how == "edited" else script.parent / "socket.py"
    with changed.open("a") as file:
        file.write("# edited")
    assert readied.activate_as(*kept.start(state)) == readied.pid
    assert status_of(readied.pid) == NOT_ITS_TURN_STATUS
    assert kept.log.read_text() == ""


@pytest.mark.parametrize(
    ("does", "visible", "may_change"),
    [
        ("", "0", True),
        ("", "", False),  # a cuInit that has found no GPU leaves no trace
        ("assert driver.cuInit(0) == 0", "0", False),
        ("import sys; version = type(sys)('torch.version'); version.hip = '6'; sys.modules[version.__name__] = version",
         "GPU-0", False),
    ],
)  # fmt: skip
def test_the_visible_gpus_may_change_until_the_driver_has_read_them(
    kept: PrestartCase, tmp_path: Path, does: str, visible: str, may_change: bool
) -> None:
    """The driver reads them in cuInit, once; until then its functions answer that it was not called."""
    node = CudaNode.make(tmp_path)
    driver = tmp_path / "libcuda.so.1"
    with (tmp_path / "lib/torch/__init__.py").open("a") as module:
        module.write(f"import ctypes\ndriver = ctypes.CDLL({str(driver)!r})\n{does}\n")
    kept.environ.update(node.environment(), CUDA_VISIBLE_DEVICES=visible)
    readied = made_ready(kept.expected())
    assert readied.check()
    waited, serves = readied.waits, readied.is_to_serve(differing(kept, CUDA_VISIBLE_DEVICES="GPU-1"))
    end(readied)
    assert (waited, serves) == (True, may_change)


def test_it_ends_with_its_supervisor_and_runs_no_line_of_the_script(script: Path) -> None:
    """The other end of the pair has ended, whatever messages it sent before."""
    known = PrestartCase(script)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        environ = {**known.environ, READY_FD: str(theirs.fileno())}
        process = subprocess.Popen(known.command, env=environ, pass_fds=(theirs.fileno(),))
    assert process.wait(PATIENCE_S) == NOT_ITS_TURN_STATUS
    assert known.log.read_text() == ""


def test_an_older_agent_would_have_run_the_script_immediately(script: Path, tmp_path: Path) -> None:
    """As after a downgrade while the job ran: the agent starts nothing before its turn."""
    (tmp_path / "sitecustomize.py").write_text("")
    known = PrestartCase(script, inject=str(tmp_path))
    assert make_ready(known.expected(), set()) is None
    assert not known.log.exists()


if __name__ == "__main__":
    end_one_when_told(Path(sys.argv[1]))

"""Every Python that a job may bring: versions, virtual environments, prefixes, paths, and those that shut us out.

Nothing is installed in any of them. Without PyTorch, a hand-written loop marks the end of its batches. Longer
than 400 lines because it has the text of the programs that those Pythons run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmctl.connection import connect
from tests.e2e.agented import INJECT, SCRIPTS, Training, undisturbed
from tests.e2e.daemon import RunningDaemon
from tests.e2e.scripted_daemon import PATIENCE_S, ScriptedDaemon
from tests.patience import HANG_S
from tests.wide import telling

pytestmark = [pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
BY_HAND = str(SCRIPTS / "by_hand.py")
OTHERS = ("python3.9", "python3.10", "python3.12", "python3.13", "python3.14")
# Whole trainings by those between the oldest and the newest are wide cells; what is read of their insides is not.
ENDS_OF_OTHERS = telling(zip(OTHERS, strict=True), [("python3.9",), ("python3.14",)])
TOO_OLD = ("python2.7", "python3.6", "python3.7", "python3.8")
# PYTHONPATH is the job's affair here.
_MAIN = "from hegmctl.cli import main; sys.exit(main())"
HEGMCTL = (sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'client')]!r}; {_MAIN}")


def find_python(name: str, *, installed: bool = False) -> str:
    """Find that Python on this machine; version managers keep theirs in a hidden folder.

    Those that `make pythons` fetches come first. They are started by a script, through a loader of their own: a test
    that copies the program asks for one that is installed.
    """
    places = [] if installed else [str(ROOT / "build" / "pythons" / "bin" / name)]
    places += map(str, sorted(Path.home().glob(f".*/versions/*/bin/{name}")))
    places += filter(None, [shutil.which(name)])  # last: a version manager puts names there that it has nothing for
    for place in places:
        if os.access(place, os.X_OK) and not subprocess.call([place, "-c", ""], stderr=subprocess.DEVNULL):
            return place
    pytest.skip(f"{name} is not on this machine" + ("" if installed else "; `make pythons` fetches some"))


@pytest.fixture(scope="module")
def expected() -> str:
    """Return what the hand-written loop prints, on this Python and without an agent; it uses nothing that differs."""
    return undisturbed([BY_HAND])


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with tempfile.TemporaryDirectory(prefix="hegm-", dir="/tmp") as folder, RunningDaemon(Path(folder)) as running:
        yield running


# Loops of every kind around a look at the stack; what was found is printed, and has to be the same for all.
LOOPS = """
import sys
sys.path.insert(0, sys.argv[1])
from hegmd.agent.state.code import position as places, value_stack as stack


class Asked:
    def __init__(self):
        self.left = 2

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        place = places.ThreadPosition(sys._getframe(1))
        looks = [places.look_into(loop.iterator, 0, lambda found: None) for loop in place.loops]
        numbers = [list(range(*look["rest"])) if look["kind"] == "range" else look.get("index") for look in looks]
        print(place.at_head, numbers, [sorted(loop.names & {"range", "enumerate"}) for loop in place.loops])
        return self.left


def train(rows):
    for epoch in range(4):
        with open("/dev/null"):
            try:
                for step, row in enumerate(rows, 7):
                    [step for _ in range(2)]
            finally:
                seen = lambda: (epoch, rows)
        if epoch == 1:
            rows = Asked()


def passing(rows):
    for row in rows:
        yield row


print(stack.can_read())
train(Asked())
for _ in range(3, 0, -1):
    for row in passing(Asked()):
        pass
    break
"""


@pytest.mark.parametrize("name", OTHERS)
def test_loops_are_read_from_the_stack_of_any_python(name: str) -> None:
    found = [
        subprocess.run([python, "-c", LOOPS, str(ROOT)], capture_output=True, text=True, check=True).stdout
        for python in (sys.executable, find_python(name))
    ]
    assert found[0].startswith("True\nTrue [[1, 2, 3], 7] [['range'], ['enumerate']]\n")
    assert found[0] == found[1]


# Threads of every kind while the trap is set: the program prints what they did meanwhile, and what is left of it
# afterwards.
TRAP = """
import os, socket, sys, threading
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, sys.argv[1])
from hegmd.agent import trap

def read(fd):
    while os.read(fd, 1) != b".": ran.append("read")

def receive(end):
    while end.recv(1) != b".": ran.append("receive")

def wait(semaphore):
    while not over: semaphore.acquire() and ran.append("wait")

def spin():
    while not over: turns[0] += 1

def catch():
    caught.add(threading.current_thread().name)
    all_caught() and every.set()
    door.wait()

def all_caught():
    return caught >= {"read", "receive", "wait", "spin", "pool_0"}

def traced(event):
    sys.settrace(lambda frame, what, argument: None)
    begun.set()
    event.wait()
    print("its own trace function", sys.gettrace() is not None)

ran, caught, over, turns = [], set(), False, [0]
door, every, begun, end = [threading.Event() for _ in range(4)]
fd, wakes = os.pipe()
near, far = socket.socketpair()
semaphore = threading.Semaphore(0)
threads = [
    threading.Thread(target=target, args=arguments, name=target.__name__)
    for target, arguments in ((read, (fd,)), (receive, (near,)), (wait, (semaphore,)), (spin, ()), (traced, (end,)))
]
for thread in threads: thread.start()
pool = ThreadPoolExecutor(1, "pool")
pool.submit(int).result()
begun.wait()
the_trap = trap.Trap(catch)
held = the_trap.set(frozenset())
debugged = threads[-1].ident in held
print("held", len(held) - debugged, debugged == (sys.version_info >= (3, 12)))
os.write(wakes, b"x"), far.send(b"x"), semaphore.release()
done = pool.submit(ran.append, "pool")
print("caught", every.wait(120), ran)
before = turns[0]
the_trap.lift()
print("spun", turns[0] - before)
door.set()
done.result()
over = True
os.write(wakes, b"."), far.send(b"."), semaphore.release(), end.set()
for thread in threads: thread.join()
pool.shutdown()
print(sorted(set(ran)), getattr(sys, "monitoring", None) and sys.monitoring.get_tool(4))
"""


@pytest.mark.parametrize("name", [Path(sys.executable).name, *OTHERS])
def test_threads_of_any_python_are_stopped_when_they_wake(name: str) -> None:
    """Issue 14, row 4."""
    python = sys.executable if name == Path(sys.executable).name else find_python(name)
    ran = subprocess.run([python, "-c", TRAP, str(ROOT)], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == [
        "held 5 True",
        "caught True []",
        "spun 0",
        "its own trace function True",
        "['pool', 'read', 'receive', 'wait'] None",
    ], ran.stderr


# A debugger, a profiler and a coverage tool, in the thread that sets the trap and in others: all are as before then.
TOOLS = """
import cProfile, os, sys, threading
sys.path.insert(0, sys.argv[1])
from hegmd.agent import trap

seen, noted = [], []
def tracer(frame, event, argument):
    seen.append(frame.f_code.co_name)
    return tracer
def profiler(frame, event, argument):
    noted.append(frame.f_code.co_name)
def work():
    return sum(range(3))
def wait(read):
    os.read(read, 1)
    work()
    kept.append((sys.gettrace(), sys.getprofile()))
def noticed(where):
    del where[:]
    work()
    return "work" in where

kept = []
monitoring = getattr(sys, "monitoring", None)
if monitoring:
    started = []
    tool, start = monitoring.COVERAGE_ID, monitoring.events.PY_START
    monitoring.use_tool_id(tool, "coverage")
    monitoring.register_callback(tool, start, lambda code, at: started.append(code.co_name))
    monitoring.set_events(tool, start)
pipes = [os.pipe() for _ in range(3)]
threads = []
for (read, _), install in zip(pipes, (None, threading.settrace, threading.setprofile)):
    if install: install(tracer if install is threading.settrace else profiler)
    threads.append(threading.Thread(target=wait, args=(read,)))
    threads[-1].start()
    if install: install(None)
profile = cProfile.Profile()
sys.settrace(tracer)
profile.enable()
own = sys.gettrace(), sys.getprofile()
caught = []
the_trap = trap.Trap(lambda: caught.append(1))
for _ in range(3):
    the_trap.set(frozenset())
    the_trap.set(frozenset())
    work()
    the_trap.lift()
print("own", (sys.gettrace(), sys.getprofile()) == own, noticed(seen), not monitoring or noticed(started))
profile.disable()
counts = [entry.callcount for entry in profile.getstats() if entry.code is work.__code__]
print("profiled", sum(counts) >= 4)
sys.settrace(None)
for (_, write), thread in zip(pipes, threads):
    os.write(write, b"."); thread.join()
print("threads", kept == [(None, None), (tracer, None), (None, profiler)])
print("monitored", not monitoring or (monitoring.get_tool(tool), monitoring.get_events(tool)) == ("coverage", start))
"""


@pytest.mark.parametrize("name", [Path(sys.executable).name, *OTHERS])
def test_a_debugger_lost_its_trace_function_to_the_trap(name: str) -> None:
    """Issue 14, row 4: before Python 3.12, in the thread that set the trap for the first time."""
    python = sys.executable if name == Path(sys.executable).name else find_python(name)
    ran = subprocess.run([python, "-c", TOOLS, str(ROOT)], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == ["own True True True", "profiled True", "threads True", "monitored True"], (
        ran.stderr
    )


# Threads that begin and end while the trap is set and lifted, with a collection between any two steps.
CHURN = """
import gc, sys, threading
sys.path.insert(0, sys.argv[1])
from hegmd.agent import trap

def churn():
    while not over:
        threads = [threading.Thread(target=int) for _ in range(3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()

sys.setswitchinterval(1e-6)
gc.set_threshold(50)
over = False
threads = [threading.Thread(target=churn) for _ in range(3)]
for thread in threads: thread.start()
the_trap = trap.Trap(lambda: None)
for _ in range(1000):
    the_trap.set(frozenset())
    the_trap.set(frozenset())
    the_trap.lift()
over = True
for thread in threads: thread.join()
print(gc.isenabled())
"""


@pytest.mark.parametrize("name", [Path(sys.executable).name, *OTHERS])
def test_threads_of_any_python_end_while_the_agent_reads_others(name: str) -> None:
    """Seen with 3.11, killed by SIGSEGV: a frame of a thread that continued during a collection."""
    python = sys.executable if name == Path(sys.executable).name else find_python(name)
    ran = subprocess.run([python, "-c", CHURN, str(ROOT)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


@pytest.mark.parametrize("name", ENDS_OF_OTHERS)
def test_boundaries_are_counted_and_stopped_at_by_any_python(name: str, socket_path: Path, expected: str) -> None:
    python = find_python(name)
    with ScriptedDaemon(socket_path) as daemon, Training([BY_HAND], socket_path, python) as training:
        agent = daemon.attended()
        assert agent.attended is not None
        assert agent.attended.python_version.startswith(name.removeprefix("python"))
        parking = agent.send("park", at=1_000_000)
        agent.done("withdraw")
        assert "withdrawn" in agent.answer(parking).message
        result = agent.done("survey", limit_s=PATIENCE_S)
        assert result.boundary is not None
        assert result.parked is False
        parked = agent.done("park", at=result.boundary + 3, limit_s=PATIENCE_S)
        assert parked.boundary is not None
        assert parked.boundary >= result.boundary + 3
        assert agent.done("survey").parked
        assert agent.done("release", limit_s=PATIENCE_S).boundary == parked.boundary + 1
        agent.move(at=parked.boundary + 20)
        status, output, errors = training.result()
    assert (status, errors) == (0, "")
    assert output == expected


# ---- as `hegmctl run` starts them -----------------------------------------------------------------------------------


def _environ(**more: str) -> dict[str, str]:
    """A job's own environment, before anything of ours."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HEGM_", "PYTHON"))}
    return {**plain, "PYTHONDONTWRITEBYTECODE": "1", **more}


def _outcomes(daemon: RunningDaemon, words: list[str], folder: Path, **more: str) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of a command, first by itself and then under `hegmctl run`."""
    outcomes = []
    for before in ((), (*HEGMCTL, "--socket", str(daemon.socket_path), "run", "--")):
        ran = subprocess.run(
            [*before, *words],
            env=_environ(**more),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        outcomes.append((ran.returncode, ran.stdout, ran.stderr))
    return outcomes


@pytest.mark.parametrize("name", TOO_OLD)
def test_a_python_that_is_too_old_for_the_agent_runs_unharmed(name: str, daemon: RunningDaemon, tmp_path: Path) -> None:
    code = "import sys, json; print(sys.version_info[:2], sorted(m for m in sys.modules if 'hegm' in m), sys.path)"
    alone, under = _outcomes(daemon, [find_python(name), "-c", code], tmp_path)
    assert alone == under
    assert alone[0] == 0


WHERE = """
import json, sys
theirs = sys.modules.get("sitecustomize")
print(json.dumps([sys.path, sys.prefix, getattr(theirs, "__file__", None), hasattr(sys, "theirs")]))
"""


@pytest.mark.parametrize(
    "path",
    ["with space", "relative/folder", "relative::with space", ":", "missing:with space:", "relative/../with space"],
)
def test_the_search_path_is_unchanged(path: str, daemon: RunningDaemon, tmp_path: Path) -> None:
    for folder in ("with space", "relative/folder"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "with space" / "sitecustomize.py").write_text("import sys\nsys.theirs = True\n")
    alone, under = _outcomes(daemon, [sys.executable, "-c", WHERE], tmp_path, PYTHONPATH=path)
    assert alone == under
    assert json.loads(under[1])[3] == ("with space" in path)


def test_a_sitecustomize_that_fails_fails_as_it_would(daemon: RunningDaemon, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('their own mistake')\n")
    words = [sys.executable, "-c", "print('runs')"]
    alone, under = _outcomes(daemon, words, tmp_path, PYTHONPATH=str(tmp_path))
    assert alone == under
    assert "their own mistake" in under[2]


@pytest.mark.parametrize("name", ["python3", *ENDS_OF_OTHERS])
def test_a_virtual_environment_and_its_own_sitecustomize_are_used(
    name: str, socket_path: Path, tmp_path: Path, expected: str
) -> None:
    """Issue 14, row 18: there was no environment of a Python that `make pythons` fetched, so 3.14 was skipped."""
    python = sys.executable if name == "python3" else find_python(name)
    venv = tmp_path / "my env"
    own = _environment_of(python, venv)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "sitecustomize.py").write_text("import os\nos.write(2, b'their own')\n")
    found = subprocess.run([own, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert found.stdout == f"{venv}\n"
    with ScriptedDaemon(socket_path) as daemon, Training([BY_HAND], socket_path, own) as training:
        daemon.attended().move(at=5)
        # Debian's Python has one of its own, which comes before that of any environment.
        before = subprocess.run([own, "-c", ""], env=_environ(), capture_output=True, text=True, check=True).stderr
        assert before in ("", "their own")
        assert training.result() == (0, expected, before)


def _environment_of(python: str, venv: Path) -> str:
    """Make a virtual environment of that Python; the path by which the environment's Python starts."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=HANG_S)
    own = venv / "bin" / "python"
    starter = Path(python).read_bytes()
    if starter.startswith(b"#!") and b" --argv0 " in starter:
        # A Python of `make pythons`: only this script starts the program that the environment links to.
        script, replaced = re.subn(rb"(--argv0 )'[^']*'", rb"\1" + os.fsencode(shlex.quote(str(own))), starter)
        assert replaced == 1, starter
        own.unlink()
        own.write_bytes(script)
        own.chmod(0o755)
    return str(own)


def test_a_prefix_as_conda_makes_them_is_agented(socket_path: Path, tmp_path: Path, expected: str) -> None:
    """A whole Python under a folder of its own, no pyvenv.cfg, found by where its library is."""
    python = Path(find_python("python3.12", installed=True)).resolve()
    prefix = tmp_path / "envs" / "train"
    (prefix / "bin").mkdir(parents=True)
    shutil.copy(python, prefix / "bin" / "python3.12")
    (prefix / "bin" / "python").symlink_to("python3.12")
    (prefix / "lib").symlink_to(python.parents[1] / "lib")
    own = str(prefix / "bin" / "python")
    output = subprocess.run([own, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    if output.stdout.strip() != str(prefix):
        pytest.skip(f"{python} does not look for its library beside itself")
    more = {"CONDA_PREFIX": str(prefix), "LD_LIBRARY_PATH": str(prefix / "lib")}
    with ScriptedDaemon(socket_path) as daemon, Training([BY_HAND], socket_path, own, **more) as training:
        daemon.attended().move(at=5)
        assert training.result() == (0, expected, "")


def test_a_python_that_shuts_us_out_runs_without_an_agent_and_is_shown_so(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    """-I and -E do not look at PYTHONPATH, -S runs no sitecustomize. `import hegm` finds nothing there."""
    code = "import sys; print(sorted(m for m in sys.modules if 'hegm' in m), sys.path, flush=True); sys.stdin.read()"
    on_gpu = ["--socket", str(daemon.socket_path), "simulate", "hold", "gpu1", "1MiB", "--"]
    started = ["--socket", str(daemon.socket_path), "run", "--"]
    jobs: list[subprocess.Popen[str]] = []
    try:
        for option in ("-I", "-E", "-S"):
            words = [*HEGMCTL, *started, *HEGMCTL, *on_gpu, sys.executable, option, "-c", code]
            job = subprocess.Popen(
                words, env=_environ(), cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            jobs.append(job)
            assert job.stdout is not None
            shown = job.stdout.readline()
            alone = subprocess.run(
                [sys.executable, option, "-c", code],
                env=_environ(),
                cwd=tmp_path,
                input="",
                capture_output=True,
                text=True,
                check=True,
            )
            # With -S the path is not searched, and so it is not put back either.
            assert shown.replace(f"{str(INJECT)!r}, ", "" if option == "-S" else "?") == alone.stdout
            assert shown.startswith("[] ")
        with connect(str(daemon.socket_path)) as hegmd:
            processes = {process.pid: process for process in hegmd.processes().processes}
        for job in jobs:
            assert processes[job.pid].agent is None
            (way,) = [way for way in processes[job.pid].ways if way.way == "agent"]
            assert not way.possible
            assert "no agent" in way.reason
        table = _hegmctl(daemon, "ps")
        (row,) = [line.split() for line in table.stdout.splitlines() if line.split()[:1] == [str(jobs[0].pid)]]
        assert row[1:7] == [processes[jobs[0].pid].job, row[2], "gpu1", "1.0", "MiB", "no"]
        refused = _hegmctl(daemon, "migrate", str(jobs[0].pid), "--to", "gpu0")
        assert refused.returncode != 0
        assert f"process {jobs[0].pid} has no agent" in refused.stderr
        assert "hegmctl run" in refused.stderr
    finally:
        for job in jobs:
            job.communicate("", timeout=HANG_S)


def _hegmctl(daemon: RunningDaemon, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HEGMCTL, "--socket", str(daemon.socket_path), *words],
        env=_environ(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.parametrize("name", ["python3.11", *OTHERS])
def test_the_scripts_own_variables_are_found_in_the_code_of_any_python(name: str) -> None:
    """Each Python has a bytecode of its own, and its own way to set what a function's variables hold."""
    python = sys.executable if name == "python3.11" and sys.version_info[:2] == (3, 11) else find_python(name)
    script = str(SCRIPTS / "variables_anywhere.py")
    done = subprocess.run([python, "-B", script], capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    places = ("0", "1", "5", "6", "12")
    assert done.stdout.splitlines() == [f"{function} {at}" for function in ("counting", "calling") for at in places]

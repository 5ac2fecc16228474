"""Fixtures that every test may use, and the check that no test leaves anything behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

from tests.comparisons import compared
from tests.leaks import RUN_MARK, ProcessResources, end_run
from tests.room import NEEDED, sentence_on

# Objects from imports during collection are permanent. Without this, the garbage collector scans them again every seven
# hundred allocations, which takes a fourteenth of the workers' time.
gc.disable()
SELDOM = (20_000, 20, 20)

# No test depends on the speed of a machine; hypothesis gives each example 200 ms.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

_numbers = count()

# The files whose assertions pytest rewrites.
_REWRITTEN = ("test_", "conftest.")

# The mark that this run gave to its processes.
_RUN = pytest.StashKey[str]()

# A shell starts its background jobs with SIGINT ignored, and what is ignored stays so in every program that is started:
# the tests of Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Programs of this environment first, as in an activated one: hegmd, hegmctl, the tools, node if it is there."""
    if RUN_MARK not in os.environ:  # in a worker it is that of the process that started the worker
        os.environ[RUN_MARK] = config.stash[_RUN] = os.urandom(8).hex()
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def pytest_unconfigure(config: pytest.Config) -> None:
    """The workers have ended; what a test that was interrupted has left ends now."""
    mark = config.stash.get(_RUN, None)
    if mark is not None:
        del os.environ[RUN_MARK]
        end_run(mark)


def pytest_sessionstart(session: pytest.Session) -> None:
    """A full disk is one sentence, and not an error of each of a thousand tests at its set-up."""
    if hasattr(session.config, "workerinput"):  # in one of several workers: their starter has checked
        return
    kind = "quick" if "not e2e" in session.config.option.markexpr else "end to end"
    for place, needed_bytes in NEEDED[kind].items():
        sentence = sentence_on(place or Path(session.config.option.basetemp or tempfile.gettempdir()), needed_bytes)
        if sentence:
            pytest.exit(sentence, returncode=pytest.ExitCode.USAGE_ERROR)
    if getattr(session.config.option, "numprocesses", None):
        _rewrite_assertions(session.config)


def _rewrite_assertions(config: pytest.Config) -> None:
    """Write the tests' rewritten assertions to pytest's cache, where they are missing, before the workers start.

    In a fresh clone each worker would rewrite all files at the same time: seven seconds of CPU time each. Workers
    rewrite a file that has changed since.
    """
    if sys.dont_write_bytecode:
        return
    files = [path for path in config.rootpath.joinpath("tests").rglob("*.py") if path.name.startswith(_REWRITTEN)]
    missing = [path for path in files if not _cached(path).exists()]
    if not missing:
        return
    child = os.fork()  # for a second processor, which would be idle meanwhile
    try:
        for path in missing[bool(child) :: 2]:
            _cached(path).parent.mkdir(exist_ok=True)
            source_hash, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, _cached(path))
    finally:
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def _cached(path: Path) -> Path:
    return rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)


def pytest_collection_finish() -> None:
    """Freeze all objects that exist now: the collector need not scan them after each test that leaves garbage.

    What is garbage among them stays: to find that took each worker 0.35 s of CPU time.
    """
    gc.freeze()
    gc.set_threshold(*SELDOM)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape logged text in a test's report, which passes through a pipe with xdist: hostile text must not break the
    pipe.
    """
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Say in one line where long bytes differ. pytest would print all of both, and the test's name far above."""
    found = compared(left, right) if op == "==" else None
    return None if found is None else [found]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """End a run with the names of its failed tests. In CI, pytest's own summary has whole messages in between."""
    yield
    reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    if reports and "CI" in os.environ:
        terminalreporter.section("failed")
        for report in reports:
            terminalreporter.write_line(report.nodeid)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a descriptor, thread, child process or changed process state behind.

    Being the first fixture of function scope it is also torn down last, after the event loop. What wider fixtures hold
    is already there when it takes stock. `@pytest.mark.leaks_allowed("why")` takes a test out.
    """
    before = ProcessResources.take()
    yield
    leaks = before.leaks()
    before.clear_children()
    if leaks and request.node.get_closest_marker("leaks_allowed") is None:
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A path that no earlier test had, because stub libraries and undisturbed runs are known by their paths.

    pytest gives the folder of a test that has passed to the next one whose name begins alike.
    """
    folder = tmp_path / f"{next(_numbers)}"
    folder.mkdir()
    return folder


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """An empty private folder with a short path: a socket's name ends at 107 bytes, and `tmp_path` comes near it."""
    folder = Path(tempfile.mkdtemp(prefix="hegm-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def socket_path(socket_dir: Path) -> Path:
    """A path for the socket of a test's daemon; it does not exist yet."""
    return socket_dir / "hegmd.sock"

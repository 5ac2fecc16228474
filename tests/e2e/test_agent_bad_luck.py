"""Failures around a parked process: daemons that die, signals, forks, threads, lies. Training always continues."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.agented import BRISK, INJECT, SCRIPTS, Training, environment, undisturbed
from tests.e2e.moved_job import BARE
from tests.e2e.scripted_daemon import PATIENCE_S, AgentConnected, Gone, ScriptedDaemon
from tests.looks import pause
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()

SLEEPER = str(SCRIPTS / "sleeper.py")
BY_HAND = str(SCRIPTS / "by_hand.py")
PLAIN = str(SCRIPTS / "plain.py")
ROOT = Path(__file__).parents[2]
LENDING = str(Path(__file__).with_name("moved") / "lending.py")
MIB = 1 << 20


def _out(agent: AgentConnected, fd: int) -> int:
    """Park it and take its bytes; how many."""
    agent.done("park", limit_s=PATIENCE_S)
    survey = agent.done("survey")
    assert survey.size_bytes is not None
    os.truncate(fd, survey.size_bytes)
    size_bytes = agent.done("offload", fd).size_bytes
    assert size_bytes is not None
    return size_bytes


@pytest.fixture
def pool():  # type: ignore[no-untyped-def] # a generator of descriptors
    fd = os.memfd_create("pool", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def test_real_memory_falls_with_an_offload_and_returns_with_a_reload(socket_path: Path, pool: int) -> None:
    more = {"HEGM_TEST_FLOATS": str(24 * MIB)}
    with ScriptedDaemon(socket_path) as daemon, Training([SLEEPER], socket_path, **more) as training:
        agent = daemon.attended()
        process = psutil.Process(training.process.pid)
        agent.done("park", at=2, limit_s=PATIENCE_S)
        before_bytes = process.memory_info().rss
        size_bytes = _out(agent, pool)
        assert size_bytes >= 2 * 4 * 24 * MIB  # weights and their gradient
        assert before_bytes - process.memory_info().rss > 0.95 * size_bytes
        agent.done("reload", pool)
        assert before_bytes - process.memory_info().rss < 0.05 * size_bytes
        agent.done("release", limit_s=PATIENCE_S)


def test_a_request_without_a_boundary_is_withdrawn_without_a_trace(socket_path: Path) -> None:
    with ScriptedDaemon(socket_path) as daemon, Training([PLAIN], socket_path) as training:
        agent = daemon.attended()
        late = agent.order("park", at=10_000_000, limit_s=0.05)
        assert late.result == "failed"
        assert "no batch boundary within 0.05 s" in late.message
        assert late.hint
        assert training.result()[1] == undisturbed([PLAIN])


def test_a_withdrawn_park_and_orders_out_of_turn_are_refused_with_a_message(socket_path: Path, pool: int) -> None:
    with ScriptedDaemon(socket_path) as daemon, Training([SLEEPER], socket_path):
        agent = daemon.attended()
        for do, word in (
            ("offload", "not parked"),
            ("release", "not parked"),
            ("reload", "no bytes of this process"),
            ("fly", "no order"),
        ):
            refused = agent.order(do, pool if do == "offload" else None)
            assert refused.result == "failed"
            assert word in refused.message
        parking = agent.send("park", at=10_000_000)
        agent.done("withdraw")
        assert "withdrawn" in agent.answer(parking).message
        agent.move()
        agent.done("park", limit_s=PATIENCE_S)
        os.truncate(pool, 4096)
        small = agent.done("offload", pool)  # what has no room stays where it is
        assert small.storages == 0
        assert "no memory for them" in " ".join(left.why for left in small.left_alone)
        assert "no bytes of this process" in agent.order("reload", pool).message
        agent.done("release", limit_s=PATIENCE_S)


def test_a_process_with_nothing_to_put_out_stayed_parked_for_ever(socket_path: Path, pool: int) -> None:
    """The agent did not reload it because nothing was offloaded, and did not release it because it counted as
    offloaded.
    """
    with ScriptedDaemon(socket_path) as daemon, Training([BY_HAND], socket_path) as training:
        agent = daemon.attended()
        agent.done("park", limit_s=PATIENCE_S)
        os.truncate(pool, MIB)
        assert agent.done("offload", pool).storages == 0
        assert "no bytes of this process are offloaded" in agent.order("reload", pool).message
        agent.done("release", limit_s=PATIENCE_S)
        assert training.result()[1] == undisturbed([BY_HAND])


def test_an_upgrade_under_a_running_agent_gave_it_half_of_another_version(
    socket_path: Path, tmp_path: Path, pool: int
) -> None:
    """It read in what it carries with when it first carried: from files that a newer package had replaced meanwhile."""
    package = tmp_path / "hegmd"
    for part in ("agent", "protocol"):
        shutil.copytree(INJECT.parents[1] / part, package / part)
    for module in ("__init__.py", "errors.py"):
        shutil.copy(INJECT.parents[1] / module, package)
    inject = package / "agent/inject"
    with ScriptedDaemon(socket_path) as daemon, Training([PLAIN], socket_path, inject=str(inject)) as training:
        agent = daemon.attended()
        shutil.rmtree(package)
        assert _out(agent, pool) > 0
        agent.done("reload", pool)
        agent.done("release", limit_s=PATIENCE_S)
        status, output, errors = training.result()
    assert (status, errors) == (0, "")
    assert output == undisturbed([PLAIN])


def test_foreign_bytes_are_not_loaded(socket_path: Path, pool: int) -> None:
    with ScriptedDaemon(socket_path) as daemon, Training([SLEEPER], socket_path):
        agent = daemon.attended()
        _out(agent, pool)
        other = os.memfd_create("other", os.MFD_CLOEXEC)
        os.truncate(other, os.fstat(pool).st_size)
        refused = agent.order("reload", other)
        os.close(other)
        assert "does not hold" in refused.message
        agent.done("reload", pool)
        agent.done("release", limit_s=PATIENCE_S)


def test_a_parked_job_survives_its_daemon_and_reports_to_the_next(socket_path: Path, pool: int) -> None:
    with Training([PLAIN], socket_path) as training:
        with ScriptedDaemon(socket_path) as first:
            agent = first.attended()
            assert agent.attended is not None
            token = agent.attended.token
            assert not agent.attended.driver_restored
            agent.move(by_driver=True)
            size_bytes = _out(agent, pool)
        with ScriptedDaemon(socket_path) as second:
            again = second.attended()
            assert again.attended is not None
            assert (again.attended.token, again.attended.parked, again.attended.held_bytes) == (token, True, size_bytes)
            assert again.attended.driver_restored
            again.done("reload", pool)
            again.done("release", limit_s=PATIENCE_S)
            status, output, errors = training.result()
    assert (status, errors) == (0, "")
    assert output == undisturbed([PLAIN])


def test_without_a_daemon_it_continues_after_the_limit(socket_path: Path, pool: int) -> None:
    with Training([PLAIN], socket_path, HEGM_PARK_LIMIT_S="0.2") as training:
        with ScriptedDaemon(socket_path) as daemon:
            _out(daemon.attended(), pool)
        status, output, errors = training.result()
    assert (status, errors) == (0, "")
    assert output == undisturbed([PLAIN])


def test_a_stopped_daemon_kept_a_job_parked_for_ever(socket_path: Path, pool: int) -> None:
    """The kernel keeps the connections of a stopped daemon, and the job waited for the end of its own."""
    limits = {"HEGM_PARK_LIMIT_S": "0.2", "HEGM_SILENCE_LIMIT_S": "0.2"}
    with ScriptedDaemon(socket_path) as daemon, Training([PLAIN], socket_path, **limits) as training:
        agent = daemon.attended()
        agent.send("park")
        status, output, errors = training.result()
    assert (status, errors) == (0, "")
    assert output == undisturbed([PLAIN])


def test_a_stopped_daemon_kept_a_block_from_its_begin_for_ever(socket_path: Path) -> None:
    """The other one was stopped before: the kernel accepted the connection, and no hello was answered."""
    more = {"HEGM_SILENCE_LIMIT_S": "0.2", "PYTHONPATH": os.pathsep.join(map(str, (BRISK, ROOT)))}
    for is_connected in (True, False):
        with ScriptedDaemon(socket_path) as daemon, Training([LENDING], socket_path, **more) as training:
            if is_connected:
                daemon.attended()
            status, output, errors = training.result()
        assert status == 0, errors
        assert "lends no GPU memory: no hegmd answers" in errors
        assert _steps(output) == _steps(undisturbed([LENDING]))


def _steps(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step")]


def test_a_suspended_job_stays_suspended_without_a_daemon(socket_path: Path, pool: int) -> None:
    """Its GPU may belong to another job by then. Without the order it would return before the next daemon knows of
    it.
    """
    with Training([PLAIN], socket_path, HEGM_PARK_LIMIT_S="0") as training:
        with ScriptedDaemon(socket_path) as first:
            agent = first.attended()
            size_bytes = _out(agent, pool)
            agent.done("rest")
        with ScriptedDaemon(socket_path) as second:
            again = second.attended()
            assert again.attended is not None
            assert (again.attended.parked, again.attended.held_bytes, again.attended.entrusted) == (
                True,
                size_bytes,
                False,
            )
            again.done("reload", pool)
            again.done("release", limit_s=PATIENCE_S)
            status, output, errors = training.result()
    assert (status, errors) == (0, "")
    assert output == undisturbed([PLAIN])


def test_the_agent_keeps_no_descriptor_of_entrusted_memory_and_accepts_another(socket_path: Path, pool: int) -> None:
    def has_descriptor() -> bool:
        folder = Path(f"/proc/{training.process.pid}/fd")
        return any("memfd:pool" in os.readlink(link) for link in folder.iterdir())

    with ScriptedDaemon(socket_path) as daemon, Training([PLAIN], socket_path) as training:
        agent = daemon.attended()
        assert "no bytes of this process are offloaded" in agent.order("entrust").message
        assert "not parked" in agent.order("rest").message
        size_bytes = _out(agent, pool)
        assert has_descriptor(), "the test would see none in any case"
        agent.done("entrust")
        assert not has_descriptor()
        agent.done("entrust")
        assert agent.done("survey").held_bytes == size_bytes
        assert "only hegmd has its bytes, and the order did not include them" in agent.order("reload").message
        elsewhere = os.memfd_create("elsewhere", os.MFD_CLOEXEC)
        whole_bytes = os.fstat(pool).st_size
        os.pwrite(elsewhere, os.pread(pool, whole_bytes, 0), 0)
        agent.done("reload", elsewhere)
        os.close(elsewhere)
        agent.done("release", limit_s=PATIENCE_S)
        status, output, errors = training.result()
    assert (status, errors) == (0, "")
    assert output == undisturbed([PLAIN])


def test_a_signal_waits_for_bytes_that_are_with_the_daemon_alone(socket_path: Path, pool: int) -> None:
    """The script would otherwise handle it with empty storages."""
    with ScriptedDaemon(socket_path) as daemon, Training([PLAIN], socket_path) as training:
        agent = daemon.attended()
        _out(agent, pool)
        agent.done("entrust")
        training.process.send_signal(signal.SIGINT)
        assert agent.done("survey").parked
        assert training.process.poll() is None
        agent.done("reload", pool)
        with contextlib.suppress(Gone):  # with its bytes it may end at once
            agent.send("release", limit_s=PATIENCE_S)
            agent.wait_until_gone()
        status, _output, errors = training.result()
    assert status == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_dead_agents_thread_let_the_job_train_with_empty_storages(socket_path: Path, pool: int) -> None:
    """The end of the agent's thread released the parked training, whether its bytes were in the process or not."""
    script = str(SCRIPTS / "deadly.py")
    log = socket_path.with_name("told")
    os.mkfifo(log)
    where = {"HEGM_TEST_TOLD": str(log)}
    with ScriptedDaemon(socket_path) as daemon, Training([script], socket_path, **where) as training:
        agent = daemon.attended()
        size_bytes = _out(agent, pool)
        log.write_text("now\n")
        assert training.process.stderr is not None
        assert training.process.stderr.readline() == "told\n"
        with contextlib.suppress(Gone):  # it may have woken up by itself
            agent.send("survey")  # it wakes up, and dies
        agent.wait_until_gone()
        again = daemon.attended()
        assert again.attended is not None
        assert (again.attended.parked, again.attended.held_bytes) == (True, size_bytes)
        again.done("reload", pool)
        again.done("release", limit_s=PATIENCE_S)
        status, output, errors = training.result()
    assert (status, errors) == (0, "")
    assert output == undisturbed([script], **where)


def test_an_interrupt_after_an_offload_reloads_the_bytes_first(socket_path: Path, pool: int) -> None:
    with ScriptedDaemon(socket_path) as daemon, Training([PLAIN], socket_path) as training:
        agent = daemon.attended()
        _out(agent, pool)
        training.process.send_signal(signal.SIGINT)
        agent.wait_until_gone()
        status, _output, errors = training.result()
    assert status == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_sleeping_thread_was_a_reason_to_refuse(socket_path: Path) -> None:
    """Issue 14, row 4. The thread is stopped when it wakes."""
    with ScriptedDaemon(socket_path) as daemon, Training([SLEEPER], socket_path, HEGM_TEST_SLEEPER="1"):
        agent = daemon.attended()
        while not agent.done("survey", limit_s=PATIENCE_S).boundary:
            pause()
        agent.done("park", limit_s=PATIENCE_S)
        assert agent.done("survey").parked


def test_tracebacks_and_classes_are_the_same_without_it(socket_path: Path) -> None:
    code = (
        "import traceback, torch.utils.data as d\n"
        "class Broken(d.Dataset):\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index): raise ValueError('broken')\n"
        "try: next(iter(d.DataLoader(Broken())))\n"
        "except ValueError: traceback.print_exc()\n"
        "print(d.dataloader._BaseDataLoaderIter.__next__.__qualname__, d.dataloader.__spec__.loader.__dict__.keys())\n"
    )
    outputs = []
    for socket in (None, socket_path):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(socket, PYTHONPATH=str(BRISK), **BARE),
            capture_output=True,
            text=True,
            check=True,
            timeout=HANG_S,
        )
        outputs.append((done.stdout, done.stderr))
    assert outputs[0] == outputs[1]


SAVES_ON_TERM = """
import signal, sys, torch
from torch.utils.data import DataLoader
torch.manual_seed(4)
weights = torch.nn.Parameter(torch.randn(100_000))
optimizer = torch.optim.SGD([weights], lr=1e-3)

def save(*_):
    torch.save(weights.detach(), sys.argv[1])
    print("saved", weights.sum().item().hex(), flush=True)
    sys.exit(3)

signal.signal(signal.SIGTERM, save)
for batch in DataLoader(range(100_000)):
    loss = (weights[:8] * batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("saved", weights.sum().item().hex(), flush=True)
"""


def test_a_checkpoint_saved_on_sigterm_after_an_offload_has_the_weights(
    socket_path: Path, tmp_path: Path, pool: int
) -> None:
    """As schedulers end jobs: the handler runs with everything back, and the exit status is the script's own."""
    script, checkpoint = tmp_path / "saves.py", tmp_path / "weights.pt"
    script.write_text(SAVES_ON_TERM)
    words = [str(script), str(checkpoint)]
    with ScriptedDaemon(socket_path) as daemon, Training(words, socket_path, **BARE) as training:
        agent = daemon.attended()
        agent.done("park", at=3, limit_s=PATIENCE_S)
        assert _out(agent, pool) >= 400_000
        training.process.terminate()
        agent.wait_until_gone()
        status, output, errors = training.result()
    *_, last, saved = output.splitlines()
    assert (status, errors) == (3, "")
    assert saved == last
    assert checkpoint.stat().st_size > 400_000

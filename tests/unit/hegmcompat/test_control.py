"""HeGM's checkpoint and resume with real processes in place of workers and launchers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hegmcompat import private_files, workers
from hegmcompat.control import Control
from hegmcompat.ctrl_cli import run
from hegmcompat.surroundings import read_surroundings
from tests.unit.hegmcompat.children import child

TAKES_IT = "signal.signal(signal.SIGUSR1, lambda *_: None)"


def control(
    folder: Path,
    *,
    limit_s: str = "10",
    gpu_users: tuple[int, ...] = (),
    survives_request: Callable[[int], bool] = workers.survives_request,
    beginning_s: float = 60.0,
) -> Control:
    environ = {
        "HEGM_CHECKPOINT_DIR": str(folder),
        "HEGM_POLL_INTERVAL": "0.01",
        "HEGM_CTRL_CHECKPOINT_TIMEOUT": limit_s,
    }
    return Control(
        read_surroundings(environ),
        uses_gpu=lambda pid: pid in gpu_users,
        survives_request=survives_request,
        beginning_s=beginning_s,
    )


def leaves_lock(folder: Path, launcher_pid: int) -> str:
    """A worker that handles the signal, and its launcher, which then writes a lock."""
    lock = folder / str(launcher_pid) / "lock"
    lock.parent.mkdir(mode=0o700, exist_ok=True)
    made = f"open({str(lock) + '.new'!r}, 'w').write('{launcher_pid}')"
    moved = f"os.replace({str(lock) + '.new'!r}, {str(lock)!r})"
    return f"signal.signal(signal.SIGUSR1, lambda *_: ({made}, {moved}, os._exit(99)))"


def test_a_file_whose_name_is_a_number_does_not_count_as_a_launcher(tmp_path: Path) -> None:
    """A superscript two is a digit but no number: such a file name ended every hegm-ctrl with a traceback."""
    for folder in (tmp_path / "²", tmp_path / ".workers"):
        folder.mkdir()
    (tmp_path / "²" / "lock").touch()
    (tmp_path / ".workers" / "²").write_text("1")
    control = Control(read_surroundings({"HEGM_CHECKPOINT_DIR": str(tmp_path)}))
    assert control.resume_all() == {}
    assert control.checkpoint_all() == {}


@pytest.mark.parametrize("text", ["99999", "-5", "8x", "²"])
def test_an_invalid_port_is_a_usage_error(text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["api-server", "--port", text], {})
    assert ended.value.code == 2


def test_a_worker_that_leaves_its_state_is_ready_and_resumed_by_its_launcher(tmp_path: Path) -> None:
    launcher = os.getpid()
    with child(leaves_lock(tmp_path, launcher)) as worker:
        workers.register(tmp_path, launcher, worker.pid)
        controller = control(tmp_path)
        assert controller.checkpoint([worker.pid]) == {worker.pid: "checkpoint-ready"}
        assert controller.pending() == [launcher]
        assert controller.resume([launcher, 1]) == {launcher: "lock-removed", 1: "no-lock"}
        assert controller.resume_all() == {}


def test_without_a_lock_the_limit_ends_the_waiting(tmp_path: Path) -> None:
    with child(TAKES_IT) as worker:
        workers.register(tmp_path, os.getpid(), worker.pid)
        controller = control(tmp_path, limit_s="0.05")
        assert controller.checkpoint([worker.pid]) == {worker.pid: "signalled (timeout-waiting-lock)"}


def test_a_lock_written_by_any_user_does_not_count_as_a_state(tmp_path: Path) -> None:
    """Issue 14, row 7: `checkpoint-ready` came after 0.1 s, and there was no state."""
    launcher = os.getpid()
    lock = tmp_path / str(launcher) / "lock"
    lock.parent.mkdir()
    lock.write_text(str(launcher))
    with child(TAKES_IT) as worker:
        workers.register(tmp_path, launcher, worker.pid)
        controller = control(tmp_path, limit_s="0.05")
        assert controller.checkpoint([worker.pid]) == {worker.pid: "signalled (timeout-waiting-lock)"}
    puts = f"open({str(lock)!r} + '.new', 'w').write('{launcher}'), os.replace({str(lock)!r} + '.new', {str(lock)!r})"
    with child(f"signal.signal(signal.SIGUSR1, lambda *_: ({puts}))") as worker:  # the worker trains on
        workers.register(tmp_path, launcher, worker.pid)
        assert controller.checkpoint([worker.pid]) == {worker.pid: "signalled (timeout-waiting-lock)"}


@pytest.mark.parametrize("written", ["", "somebody"])
def test_a_lock_that_names_another_launcher_does_not_count(tmp_path: Path, written: str) -> None:
    """Issue 14, row 7: a worker that has exited has left its state only if its launcher says so."""
    lock = tmp_path / str(os.getpid()) / "lock"
    lock.parent.mkdir()
    puts = f"print({written!r}, end='', file=open({str(lock)!r}, 'w')), os._exit(99)"
    with child(f"signal.signal(signal.SIGUSR1, lambda *_: ({puts}))") as worker:
        workers.register(tmp_path, os.getpid(), worker.pid)
        controller = control(tmp_path, limit_s="0.3")
        assert controller.checkpoint([worker.pid]) == {worker.pid: "signalled (timeout-waiting-lock)"}


def test_a_limit_of_0_did_not_start(tmp_path: Path) -> None:
    """Issue 14, row 7: HeGM takes 0 for asking without waiting, and for looking as often as can be."""
    with child(TAKES_IT) as worker:
        workers.register(tmp_path, os.getpid(), worker.pid)
        controller = control(tmp_path, limit_s="0")
        assert controller.checkpoint([worker.pid]) == {worker.pid: "signalled (timeout-waiting-lock)"}


def test_a_launcher_that_ends_without_a_lock_is_reported(tmp_path: Path) -> None:
    with child() as launcher, child(TAKES_IT) as worker:
        workers.register(tmp_path, launcher.pid, worker.pid)
        controller = control(tmp_path, limit_s="60")
        ending = threading.Timer(0.05, launcher.kill)
        ending.start()
        assert controller.checkpoint([worker.pid]) == {worker.pid: "signalled (launcher-exited)"}
        ending.join()


def test_a_refusing_worker_reports_the_reason_immediately(tmp_path: Path) -> None:
    refused = tmp_path / str(os.getpid()) / "refused"
    refused.parent.mkdir()
    private_files.write(refused, b"of an earlier request")
    says = f"os.replace({str(refused)!r} + '.new', {str(refused)!r})"
    Path(f"{refused}.new").write_text("a loop over a list cannot be found again\n")
    with child(f"signal.signal(signal.SIGUSR1, lambda *_: {says})") as worker:
        workers.register(tmp_path, os.getpid(), worker.pid)
        controller = control(tmp_path, limit_s="60")
        assert controller.checkpoint([worker.pid]) == {worker.pid: "error: a loop over a list cannot be found again"}


def test_only_workers_of_launchers_are_signalled(tmp_path: Path) -> None:
    """HeGM's hegm-ctrl sends SIGUSR1 to any pid that it gets, which kills a process that does not handle it."""
    with child() as stranger:
        assert control(tmp_path).checkpoint([stranger.pid]) == {
            stranger.pid: "error: it is not a worker of a hegm-launcher"
        }
        assert stranger.poll() is None


def test_a_worker_that_sigusr1_would_end_gets_no_signal(tmp_path: Path) -> None:
    with child() as worker:
        workers.register(tmp_path, os.getpid(), worker.pid)
        (became,) = control(tmp_path, beginning_s=0.0).checkpoint([worker.pid]).values()
        assert became.startswith("error: SIGUSR1 would kill it")
        assert worker.poll() is None


def test_a_starting_worker_gets_the_request_once_its_agent_is_connected(tmp_path: Path) -> None:
    """It was refused by chance: most often its Python had come so far before that of hegm-ctrl had."""
    begins = f"print('ready', flush=True); input(); {leaves_lock(tmp_path, os.getpid())}"
    with child(f"{begins}; print('begun', flush=True)") as worker:
        workers.register(tmp_path, os.getpid(), worker.pid)
        checks: list[bool] = []

        def survives(pid: int) -> bool:
            checks.append(workers.survives_request(pid))
            if len(checks) == 1:
                assert worker.stdin is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
            return checks[-1]

        controller = control(tmp_path, survives_request=survives)
        assert controller.checkpoint([worker.pid]) == {worker.pid: "checkpoint-ready"}
        assert checks[0] is False


def test_a_worker_that_exits_before_its_agent_connects_is_not_a_process(tmp_path: Path) -> None:
    with child() as worker:
        workers.register(tmp_path, os.getpid(), worker.pid)

        def ends(_pid: int) -> bool:
            worker.kill()
            return False

        controller = control(tmp_path, survives_request=ends)
        assert controller.checkpoint([worker.pid]) == {worker.pid: "no-such-process"}


@pytest.mark.parametrize("pid", [0, -1, -4711, 2**22 + 1, 2**64])
def test_pids_that_mean_groups_or_all_processes_are_refused(tmp_path: Path, pid: int) -> None:
    """HeGM's gives -1 to kill(2), which is every process there is."""
    assert control(tmp_path).checkpoint([pid]) == {pid: "no-such-process"}


def test_a_worker_below_a_shell_is_found_by_its_ancestors(tmp_path: Path) -> None:
    with child(leaves_lock(tmp_path, os.getpid())) as worker, child() as shell:
        workers.register(tmp_path, os.getpid(), shell.pid)
        assert control(tmp_path).checkpoint([worker.pid]) == {worker.pid: "checkpoint-ready"}


def test_every_listed_process_uses_a_gpu(tmp_path: Path) -> None:
    with child(leaves_lock(tmp_path, os.getpid())) as using, child() as launcher, child(TAKES_IT) as idle:
        workers.register(tmp_path, os.getpid(), using.pid)
        workers.register(tmp_path, launcher.pid, idle.pid)
        controller = control(tmp_path, gpu_users=(using.pid,))
        assert controller.checkpoint_all() == {using.pid: "checkpoint-ready", idle.pid: "skipped-no-gpu"}


def test_processes_with_an_open_gpu_are_found_by_their_descriptors(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    with child(f"held = open({str(device)!r})") as using, child() as idle:
        assert workers.uses_gpu(using.pid, (str(tmp_path / "nvidia"),))
        assert not workers.uses_gpu(idle.pid, (str(tmp_path / "nvidia"),))
        assert not workers.uses_gpu(using.pid)


def test_an_exited_launcher_is_forgotten(tmp_path: Path) -> None:
    with child() as launcher, child(TAKES_IT) as worker:
        workers.register(tmp_path, launcher.pid, worker.pid)
        assert workers.registered(tmp_path) == {launcher.pid: worker.pid}
    assert workers.registered(tmp_path) == {}
    assert os.listdir(tmp_path / ".workers") == []


def test_an_entry_that_is_not_a_pid_or_is_a_link_is_skipped(tmp_path: Path) -> None:
    private_files.make_folder(tmp_path / ".workers")
    own = tmp_path / ".workers" / str(os.getpid())
    own.write_text("rm -rf")
    assert workers.registered(tmp_path) == {}
    own.unlink()
    (tmp_path / "pid").write_text(str(os.getpid()))
    own.symlink_to(tmp_path / "pid")
    assert workers.registered(tmp_path) == {}


def test_a_signal_held_back_is_survived_and_the_default_is_not() -> None:
    with child("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])") as holding, child() as naked:
        assert workers.survives_request(holding.pid)
        assert not workers.survives_request(naked.pid)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert not workers.survives_request(os.getpid())

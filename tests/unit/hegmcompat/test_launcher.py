"""The launcher's loop with shell scripts in place of workers: locks, states, exit statuses and signals."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hegmcompat.launcher import normalized
from tests.patience import HANG_S
from tests.unit.hegmctl.test_agentless import TRAINS

PATIENCE_S = HANG_S
# Leaves its state at the first turn, and says what it was given at the next.
LEAVES_ONCE = """\
if [ -z "$HEGM_STATE" ]; then
    echo the state > "$HEGM_CHECKPOINT_PATH.new"; mv "$HEGM_CHECKPOINT_PATH.new" "$HEGM_CHECKPOINT_PATH"
    exit 99
fi
printf back > /proc/self/fd/"$HEGM_STATE_LOCK_FD"
echo "goes on with $(cat "$HEGM_STATE")\""""


class Launched:
    """A launcher in a process of its own, with its output line by line."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder / str(process.pid)
        self._unread = b""
        self._is_over = False

    def line(self) -> str:
        """The next line; empty at the end of its output."""
        assert self.process.stdout is not None
        while b"\n" not in self._unread:
            assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], self._unread
            came = os.read(self.process.stdout.fileno(), 4096)
            if not came:
                output, self._unread = self._unread.decode(), b""
                assert output or not self._is_over, "its output is at its end"
                self._is_over = True
                return output
            self._unread += came
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def lines_until(self, message: str) -> list[str]:
        lines = [self.line()]
        while message not in lines[-1]:
            assert len(lines) < 200, lines
            lines.append(self.line())
        return lines

    def end(self) -> tuple[int, str]:
        """Return the exit status and the standard error."""
        _output, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors.decode()


@contextmanager
def launched(
    folder: Path, script: str, *options: str, program: tuple[str, ...] = ("sh", "-c"), **environ: str
) -> Iterator[Launched]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEGM_")}
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    settings = {"HEGM_CHECKPOINT_DIR": str(folder), "HEGM_POLL_INTERVAL": "0.02", "HEGM_CTRL_PORT": "0"}
    settings |= {"HEGM_LOG_LEVEL": "QUIET", "HEGM_SOCKET": str(folder / "nobody.sock"), **environ}
    words = [sys.executable, "-m", "hegmcompat.launcher_cli", *options, *program, script]
    with subprocess.Popen(words, env=kept | settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield Launched(process, folder)
        finally:
            process.kill()


@pytest.mark.thorough
def test_an_exited_worker_is_restarted_from_its_state_when_the_lock_is_removed(tmp_path: Path) -> None:
    with launched(tmp_path, LEAVES_ONCE, "--debug") as launcher:
        lines = launcher.lines_until("Waiting for controller")
        assert lines == [
            "[Launcher] ---- iteration 1 ----",
            *f"[Launcher] Spawning: sh -c {LEAVES_ONCE}".splitlines(),
            "[Launcher] Worker exited with code 99",
            "[Launcher] Worker ready for snapshot.",
            "[Launcher] Checkpoint buffered (0.0 MB).",
            f"[Launcher] Lock at {launcher.folder / 'lock'}. Waiting for controller...",
        ]
        assert (launcher.folder / "lock").read_text() == str(launcher.process.pid)
        assert (launcher.folder / "latest.pt").read_text() == "the state\n"
        assert launcher.folder.stat().st_mode & 0o777 == 0o700
        (launcher.folder / "lock").unlink()
        assert launcher.lines_until("goes on with the")[-1] == "goes on with the state"
        assert launcher.end()[0] == 0
    assert os.listdir(tmp_path) == [".workers"]
    assert os.listdir(tmp_path / ".workers") == []


@pytest.mark.thorough
def test_a_state_whose_folder_was_deleted_is_restored_from_memory(tmp_path: Path) -> None:
    """A launcher that CRIU has restored on another node finds an empty volume there."""
    with launched(tmp_path, LEAVES_ONCE, "--debug") as launcher:
        launcher.lines_until("Waiting for controller")
        for name in ("latest.pt", "command", "lock"):
            (launcher.folder / name).unlink()
        assert launcher.lines_until("goes on with the")[-1] == "goes on with the state"


@pytest.mark.thorough
@pytest.mark.parametrize(("script", "status"), [("exit 3", 3), ("kill -KILL $$", -9), ("kill -TERM $$", -15)])
def test_the_launcher_exits_as_its_worker_does(tmp_path: Path, script: str, status: int) -> None:
    with launched(tmp_path, script) as launcher:
        assert launcher.end() == (status, "")


@pytest.mark.thorough
def test_unfinished_files_of_a_killed_worker_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in (".state.pt-0123456789abcdef", ".state.pt-notes", "state.pt-0123456789abcdef"):
        (folder / name).touch()
    with launched(tmp_path, f"ls -A {folder}", HEGM_CHECKPOINT_PATH=str(folder / "state.pt")) as launcher:
        found = {launcher.line() for _ in range(3)}
    assert found == {".state.pt-notes", "command", "state.pt-0123456789abcdef"}


@pytest.mark.thorough
def test_an_exit_with_99_and_no_state_is_the_workers_own(tmp_path: Path) -> None:
    """HeGM's launcher would wait for a controller, and then start from the beginning."""
    with launched(tmp_path, "exit 99") as launcher:
        status, errors = launcher.end()
    assert status == 99
    assert "saved no state" in errors


@pytest.mark.thorough
def test_another_exit_code_can_be_agreed_on(tmp_path: Path) -> None:
    with launched(tmp_path, LEAVES_ONCE.replace("99", "42"), "--debug", HEGM_EXIT_CODE="42") as launcher:
        launcher.lines_until("Waiting for controller")


@pytest.mark.thorough
def test_signals_reach_the_worker_and_its_end_is_the_launchers(tmp_path: Path) -> None:
    with launched(tmp_path, "trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done") as launcher:
        assert launcher.line() == "up"
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end()[0] == 7


def test_a_worker_starts_with_the_request_blocked_and_everything_else_unchanged(tmp_path: Path) -> None:
    with launched(tmp_path, "/proc/self/status", program=("cat",)) as launcher:  # some shells let all signals through
        blocked = int(launcher.lines_until("SigBlk:")[-1].split()[1], 16)
    before = sum(1 << (number - 1) for number in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    assert blocked == before | 1 << (signal.SIGUSR1 - 1)


@pytest.mark.thorough
def test_ending_a_waiting_launcher_leaves_the_state(tmp_path: Path) -> None:
    with launched(tmp_path, LEAVES_ONCE, "--debug") as launcher:
        launcher.lines_until("Waiting for controller")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end()[0] == -signal.SIGTERM
        assert sorted(os.listdir(launcher.folder)) == ["command", "latest.pt"]


@pytest.mark.thorough
def test_a_common_path_is_continued_from_by_the_next_launcher_of_the_same_command(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "state.pt"
    with launched(tmp_path, LEAVES_ONCE, "--debug", HEGM_CHECKPOINT_PATH=str(path)) as launcher:
        launcher.lines_until("Waiting for controller")
        assert (path.parent / "lock").exists()
    with launched(tmp_path, LEAVES_ONCE, HEGM_CHECKPOINT_PATH=str(path)) as launcher:
        assert launcher.line() == "goes on with the state"
        status, errors = launcher.end()
    assert status == 0
    assert f"the training continues from {path}" in errors
    assert os.listdir(path.parent) == []


@pytest.mark.thorough
def test_a_state_of_another_command_is_kept_and_not_loaded(tmp_path: Path) -> None:
    """HeGM loads any file under its pid, which may be weeks old and of another training."""
    path = tmp_path / "mine" / "state.pt"
    with launched(tmp_path, LEAVES_ONCE, "--debug", HEGM_CHECKPOINT_PATH=str(path)) as launcher:
        launcher.lines_until("Waiting for controller")
    with launched(tmp_path, 'echo "state: $HEGM_STATE"', HEGM_CHECKPOINT_PATH=str(path)) as launcher:
        assert launcher.line() == "state: "
        status, errors = launcher.end()
    assert status == 0
    assert "belongs to another command" in errors
    assert (path.parent / "state.pt.other").read_text() == "the state\n"


@pytest.mark.thorough
@pytest.mark.parametrize("made", ["torch.save", "link"])
def test_a_foreign_state_starts_nothing(tmp_path: Path, made: str) -> None:
    path = tmp_path / "state.pt"
    if made == "link":
        path.symlink_to("/etc/passwd")
    else:
        path.write_bytes(b"PK\x03\x04 a pickle")
    with launched(tmp_path, "echo started", HEGM_CHECKPOINT_PATH=str(path)) as launcher:
        assert launcher.line() == ""
        status, errors = launcher.end()
    assert status == 6
    assert str(path) in errors
    assert os.path.lexists(path)


@pytest.mark.thorough
def test_a_state_is_not_thrown_away_where_a_shell_hides_the_exit_code(tmp_path: Path) -> None:
    """`sh -c 'python train.py; echo over'` ended with 0, which was mistaken for the end of the training."""
    script = 'echo the state > "$HEGM_CHECKPOINT_PATH.new"; mv "$HEGM_CHECKPOINT_PATH.new" "$HEGM_CHECKPOINT_PATH"'
    with launched(tmp_path, script) as launcher:
        status, errors = launcher.end()
        assert (launcher.folder / "latest.pt").read_text() == "the state\n"
    assert status == 6
    assert "has saved its state" in errors


@pytest.mark.thorough
def test_a_worker_that_ended_well_without_its_state_took_the_file_with_it(tmp_path: Path) -> None:
    """A script that found nothing to do: its exit counted as the end of the training, and its state was deleted."""
    path = tmp_path / "state.pt"
    script = LEAVES_ONCE.replace("printf back", "true")
    with launched(tmp_path, script, "--debug", HEGM_CHECKPOINT_PATH=str(path)) as launcher:
        launcher.lines_until("Waiting for controller")
        (tmp_path / "lock").unlink()
        launcher.lines_until("goes on with the state")
        status, errors = launcher.end()
    assert status == 98
    assert f"no training in it has continued from {path}" in errors
    assert path.read_text() == "the state\n"


@pytest.mark.thorough
def test_a_worker_that_starts_over_without_the_agent_is_ended_and_its_state_stays(tmp_path: Path) -> None:
    torch, trains = tmp_path / "libtorch_cpu.so", tmp_path / "trains.py"
    torch.write_bytes(bytes(4096))
    trains.write_text(TRAINS)
    leaves, _, _ = LEAVES_ONCE.partition("printf")
    path = tmp_path / "state.pt"
    script = f"{leaves}sleep 1000 | {shlex.quote(sys.executable)} -I {trains} {torch}"
    with launched(tmp_path, script, "--debug", HEGM_CHECKPOINT_PATH=str(path)) as launcher:
        launcher.lines_until("Waiting for controller")
        (tmp_path / "lock").unlink()
        launcher.lines_until("mapped")
        status, errors = launcher.end()
    assert status == 98
    assert "has started over: the option -I leaves hegmd's agent out" in errors
    assert path.read_text() == "the state\n"


@pytest.mark.thorough
def test_a_command_that_keeps_the_agent_out_does_not_begin_where_a_state_is(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_text("the state")
    words = [sys.executable, "-I", "t.py"]
    (tmp_path / "command").write_text(json.dumps([str(Path.cwd()), *words]))
    with launched(tmp_path, words[-1], program=(words[0], words[1]), HEGM_CHECKPOINT_PATH=str(path)) as launcher:
        status, errors = launcher.end()
    assert status == 6
    assert f"`-I` keeps hegmd's agent out of {sys.executable}" in errors
    assert path.read_text() == "the state"


@pytest.mark.thorough
def test_a_directory_in_place_of_the_lock_is_reported_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with launched(tmp_path, "echo started", HEGM_CHECKPOINT_PATH=str(tmp_path / "state.pt")) as launcher:
        assert launcher.line() == ""
        status, errors = launcher.end()
    assert status == 6
    assert f"{tmp_path / 'lock'} is in the way" in errors
    assert "Traceback" not in errors


@pytest.mark.thorough
def test_a_removed_working_directory_is_reported(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd {gone} && rmdir {gone} && exec "$@"'
    program = (sys.executable, "-m", "hegmcompat.launcher_cli", "true")
    settings = {"HEGM_CHECKPOINT_DIR": str(tmp_path), "HEGM_CTRL_PORT": "0"}
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    words = ["sh", "-c", script, "sh", *program]
    done = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert "the working folder was removed" in done.stderr


@pytest.mark.thorough
def test_an_old_lock_does_not_belong_to_a_new_worker(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with launched(tmp_path, f"ls {tmp_path}", HEGM_CHECKPOINT_PATH=str(tmp_path / "state.pt")) as launcher:
        assert "lock" not in [launcher.line() for _ in range(2)]


@pytest.mark.thorough
def test_the_worker_does_not_get_the_token_but_its_agents_settings(tmp_path: Path) -> None:
    with launched(tmp_path, "env; echo =THE=END=", HEGM_CTRL_TOKEN="0123456789abcdef") as launcher:
        lines = dict(line.partition("=")[::2] for line in launcher.lines_until("=THE=END="))
        assert "HEGM_CTRL_TOKEN" not in lines
        assert "HEGM_STATE" not in lines
        assert lines["HEGM_CHECKPOINT_PATH"] == str(launcher.folder / "latest.pt")
        assert lines["HEGM_LAUNCHER"] == str(launcher.process.pid)
        assert lines["PYTHONPATH"].split(os.pathsep)[0].endswith("hegmd/agent/inject")


@pytest.mark.thorough
def test_an_interface_open_to_others_takes_a_token(tmp_path: Path) -> None:
    with launched(tmp_path, "echo started", HEGM_CTRL_HOST="0.0.0.0") as launcher:
        assert launcher.line() == ""
        status, errors = launcher.end()
    assert status == 2
    assert "HEGM_CTRL_TOKEN" in errors


@pytest.mark.thorough
def test_a_missing_command_is_reported_before_anything_is_created(tmp_path: Path) -> None:
    settings = {"HEGM_CHECKPOINT_DIR": str(tmp_path / "none"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-m", "hegmcompat.launcher_cli", "no-such-command"]
    done = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert "no-such-command cannot be run" in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("words", "status"), [([], 0), (["--help"], 0), (["--debug"], 1)])
def test_without_a_command_the_usage_is_printed_as_by_hegm(words: list[str], status: int) -> None:
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "hegmcompat.launcher_cli", *words]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert done.stderr.startswith("Usage: hegm-launcher [--debug] <command> [args ...]\n")


def test_a_script_alone_is_run_by_python() -> None:
    assert normalized(["train.py", "--epochs", "3"]) == [sys.executable, "-u", "train.py", "--epochs", "3"]
    assert normalized(["python", "train.py"]) == ["python", "train.py"]

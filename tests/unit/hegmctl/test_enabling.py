"""HeGM's own form of use: an environment whose trainings save at SIGUSR1 without a launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hegmd.agent import hegm_launcher
from hegmd.agent.hegm_signal import ENABLED, STATE_PATH
from tests.e2e.moved_job import BARE, BRISK
from tests.needs import need_torch

ROOT = Path(__file__).parents[3]
TRAINING = """
import os, signal, torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(2000, 4), torch.randn(2000, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
for step, (inputs, targets) in enumerate(DataLoader(data, batch_size=2, shuffle=True)):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), flush=True)
    input()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment without packages of its own."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, symlinks=True)
    return folder


def _hegmctl(*words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hegmctl", *words]
    kept = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return subprocess.run(argv, env={**kept, **(environ or {})}, capture_output=True, text=True, check=False)


def _packages(environment: Path) -> Path:
    return next(environment.glob("lib/python3*/site-packages"))


@pytest.fixture
def made(environment: Path) -> Iterator[Path]:
    """Return the environment after `hegmctl hegm enable`."""
    done = _hegmctl("hegm", "enable", "--venv", str(environment))
    assert done.returncode == 0, done.stderr
    yield environment
    _hegmctl("hegm", "disable", "--venv", str(environment))


@pytest.mark.thorough
def test_enable_and_disable_restore_an_environment(environment: Path) -> None:
    """Issue 14, row 7."""
    before = sorted(_packages(environment).rglob("*"))
    for words, is_enabled in ((["enable"], True), (["status"], True), (["disable"], False), (["status"], False)):
        done = _hegmctl("--json", "hegm", *words, environ={"VIRTUAL_ENV": str(environment)})
        assert json.loads(done.stdout)["is_enabled"] is is_enabled, done.stderr
    assert sorted(_packages(environment).rglob("*")) == before


def test_a_file_of_another_maker_is_never_touched(environment: Path) -> None:
    """Issue 14, row 7."""
    foreign = _packages(environment) / "hegmd_enabled.py"
    foreign.write_text("mine = 1\n")
    try:
        for words in ("enable", "disable"):
            done = _hegmctl("hegm", words, "--venv", str(environment))
            assert (done.returncode, "is not hegmd's" in done.stderr) == (6, True), done.stderr
        assert foreign.read_text() == "mine = 1\n"
    finally:
        foreign.unlink()


def test_a_path_without_an_environment_is_reported(tmp_path: Path) -> None:
    """Issue 14, row 7."""
    assert "no virtual environment" in _hegmctl("hegm", "enable", "--venv", str(tmp_path)).stderr
    assert "VIRTUAL_ENV is not set" in _hegmctl("hegm", "enable").stderr


def test_a_name_that_is_too_long_for_a_file_ended_in_a_traceback(tmp_path: Path) -> None:
    done = _hegmctl("hegm", "enable", "--venv", str(tmp_path / ("x" * 300)))
    assert done.returncode == 5
    assert "no virtual environment" in done.stderr


@pytest.mark.thorough
def test_a_python_without_pytorch_keeps_its_signals(made: Path) -> None:
    """Issue 14, row 7: signals are taken where a training is, and nowhere else."""
    words = [
        str(made / "bin/python"),
        "-c",
        "import signal, sys; print(signal.getsignal(signal.SIGUSR1).name, '_hegm' in sys.modules)",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "SIG_DFL True\n", done.stderr


class _Run:
    """One start of the training. It makes a batch for each line that it reads."""

    def __init__(self, environment: Path, folder: Path) -> None:
        environ = {
            "PATH": "/usr/bin:/bin",
            "HEGM_CHECKPOINT_PATH": str(folder / "left/latest.pt"),
            "HEGM_SOCKET": str(folder / "none"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(BRISK),
            **BARE,
        }
        words = [environment / "bin/python", "train.py"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(words, cwd=folder, env=environ, text=True, **pipes)  # type: ignore[call-overload] # three pipes

    def batches(self, count: int) -> list[str]:
        """Return its output for that many batches; let it continue after each but the last."""
        found: list[str] = []
        for number in range(count):
            found.append(self.process.stdout.readline())
            if number < count - 1:
                self.go_on()
        return found

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def batches_until_it_ends(self) -> list[str]:
        """Return its output for all further batches; let it continue each time that it has printed one."""
        found: list[str] = []
        with suppress(BrokenPipeError):
            self.go_on()
            while line := self.process.stdout.readline():
                found.append(line)
                self.go_on()
        return found

    def end(self) -> tuple[int, list[str], str]:
        """Its status, and what it has printed meanwhile."""
        output, errors = self.process.communicate("\n" * 1000)
        return self.process.returncode, output.splitlines(keepends=True), errors


@pytest.mark.thorough
def test_plain_python_saves_at_the_signal_and_continues_from_there(made: Path, tmp_path: Path) -> None:
    """Issue 14, row 7: HeGM's users start `python train.py`, and hegmd had no such form."""
    need_torch()
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    link = _packages(made) / "torch-of-the-tests.pth"
    link.write_text(str(Path(spec.origin).parents[1]) + "\n")
    (tmp_path / "train.py").write_text(TRAINING)
    try:
        undisturbed = _Run(made, tmp_path).end()
        assert undisturbed[0] == 0, undisturbed[2]
        first = _Run(made, tmp_path)
        printed = first.batches(3)
        first.process.send_signal(signal.SIGUSR1)
        printed += first.batches_until_it_ends()
        _, errors = first.process.communicate()
        assert first.process.returncode == 99, errors
        again = _Run(made, tmp_path).end()
        assert again[0] == 0, again[2]
    finally:
        link.unlink()
    assert len(printed) < 1000
    assert printed + again[1] == undisturbed[1]
    assert sorted(path.name for path in (tmp_path / "left").iterdir()) == ["latest.pt.done"]


def test_a_state_of_another_command_is_not_taken_nor_overwritten(tmp_path: Path) -> None:
    """Issue 14, row 7: HeGM loads any file at that path."""
    state = tmp_path / "latest.pt"
    environ = {ENABLED: str(os.getpid()), STATE_PATH: str(state)}
    assert hegm_launcher.against(environ) is None
    state.write_bytes(b"theirs")
    (tmp_path / "command").write_bytes(b"/elsewhere\0python\0other.py\0")
    assert not hegm_launcher.is_own(str(state))
    assert hegm_launcher.against(environ) is not None
    (tmp_path / "command").write_bytes(hegm_launcher.command())
    assert hegm_launcher.is_own(str(state))
    assert hegm_launcher.against(environ) is None
    assert hegm_launcher.against({**environ, ENABLED: "1"}) is None, "it is a worker of a launcher"

"""PyTorch's own loops during its import are not the script's, and no state can be read at that time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hegmd.agent.state.storage import state_file

INJECT = Path(__file__).parents[4] / "hegmd" / "agent" / "inject"
LOADERS = """
class _BaseDataLoaderIter:
    def __next__(self): ...
class DataLoader:
    def __iter__(self): ...
"""


def test_progress_bars_during_the_import_of_pytorch_made_the_state_be_read_too_early(tmp_path: Path) -> None:
    """The tensors of the bar imported torch.fx too early, and PyTorch could no longer be imported."""
    (tmp_path / "torch" / "utils" / "data").mkdir(parents=True)
    (tmp_path / "tqdm").mkdir()
    for package in ("torch/utils", "torch/utils/data", "tqdm"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "torch" / "__init__.py").write_text(
        "__version__ = '2.13.0'\nimport torch.utils.data.dataloader\nimport tqdm.std\n"
    )
    (tmp_path / "torch" / "utils" / "data" / "dataloader.py").write_text(LOADERS)
    (tmp_path / "tqdm" / "std.py").write_text("assert list(range(2)) == [0, 1]\n")
    (tmp_path / "state").write_bytes(b"no state, as whoever reads it says")
    environ = {"PYTHONPATH": f"{INJECT}:{tmp_path}", "HEGM_STATE": str(tmp_path / "state"), "HEGM_SOCKET": "/nobody"}
    words = [sys.executable, "-c", "import torch\nprint('imported', flush=True)\nfor _ in range(2): pass"]
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr
    assert done.returncode == 98
    assert "the state cannot be read" in done.stderr


@pytest.mark.thorough
def test_a_python_started_before_the_training_claimed_its_state_and_ended_the_job(tmp_path: Path) -> None:
    """`python -c "import torch"` in front of the training, and no restart came past that."""
    (tmp_path / "torch" / "utils" / "data").mkdir(parents=True)
    for package in ("torch", "torch/utils", "torch/utils/data"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.13.0'\n")
    (tmp_path / "torch" / "utils" / "data" / "dataloader.py").write_text(LOADERS)
    script = "import torch.utils.data.dataloader\n"
    place = {"path": [("__main__", "<module>", 1, 2)], "loops": [], "driver": None}
    with (tmp_path / "state").open("wb") as file:
        state_file.write(file.fileno(), {"place": place, "passes": []})
    environ = {"PYTHONPATH": f"{INJECT}:{tmp_path}", "HEGM_STATE": str(tmp_path / "state"), "HEGM_SOCKET": "/nobody"}

    def run(text: str) -> tuple[int, str]:
        words = [sys.executable, "-c", text]
        done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert run(script) == (0, "hegm: this script is not the one that left its state, which waits for that one.\n")
    for same in (f"{script}print('the place')", f"{script}\nfor _ in torch.utils.data.dataloader.DataLoader(): pass"):
        status, output = run(same)
        assert status == 98, output


@pytest.mark.thorough
def test_a_loader_that_cannot_be_followed_prevents_the_restart(tmp_path: Path) -> None:
    """The agent's error was noted and the import continued: no state was waited for, and no step forbidden."""
    (tmp_path / "torch" / "utils" / "data").mkdir(parents=True)
    for package in ("torch", "torch/utils", "torch/utils/data"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "torch" / "utils" / "data" / "dataloader.py").write_text("class DataLoader: ...\n")
    (tmp_path / "state").write_bytes(b"no state")
    environ = {"PYTHONPATH": f"{INJECT}:{tmp_path}", "HEGM_SOCKET": "/nobody"}
    words = [sys.executable, "-c", "import torch.utils.data.dataloader\nprint('it trains')"]
    for state, expected in (({}, ("it trains\n", 0)), ({"HEGM_STATE": str(tmp_path / "state")}, ("", 98))):
        done = subprocess.run(
            words, env={**environ, **state}, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.returncode) == expected, done.stderr
    assert "torch.utils.data.dataloader is not one that the agent can follow" in done.stderr

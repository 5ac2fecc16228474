"""What PyTorch imports on its way is no loop of the script's, and no moment at which a state could be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

INJECT = Path(__file__).parents[4] / "hegmd" / "agent" / "inject"
LOADERS = """
class _BaseDataLoaderIter:
    def __next__(self): ...
class DataLoader:
    def __iter__(self): ...
"""


def test_bars_that_pytorch_imports_had_the_state_read_beside_half_of_it(tmp_path: Path) -> None:
    """Its tensors then imported torch.fx before its time, and PyTorch could not be imported any more."""
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

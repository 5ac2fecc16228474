"""Programs for machines with GPUs, rehearsed over the stub driver: no time there is for their own mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.stubs.cuda.node import GIB, CudaNode

ROOT = Path(__file__).parents[2]


def rehearse(program: str, folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it on its own node with two stub GPUs, in that folder, which is created."""
    folder.mkdir()
    node = CudaNode.make(folder / "node", gpus=2, gpu_bytes=64 * GIB)
    scenario = node.nvml(folder / "nvml")
    scenario.link_all()
    scenario.write()
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    return subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{program}", *words],
        env={**os.environ, **node.environment(), **scenario.environment(), **paths, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

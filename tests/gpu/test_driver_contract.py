"""The driver's contract on real GPUs: the rows that tests/contract/test_cuda.py runs over the stub, each as a process.

`python3 -m tests.gpu.test_driver_contract [ROW...]` does the same without pytest and prints a table; it needs
cuda-bindings, nvidia-ml-py and what hegmd needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hegmd.testing.video_memory import ROWS
from tests.gpu import nvidia_smi

REPO = Path(__file__).resolve().parents[2]
ROW_S = 120

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.contract,
    pytest.mark.timeout(ROW_S + 10),
    pytest.mark.skipif(not nvidia_smi.is_there(), reason="no nvidia-smi here"),
]


def run_row(name: str) -> subprocess.CompletedProcess[str]:
    paths = [str(REPO), str(REPO / "client"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "tests.stubs.cuda.rig", name],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=ROW_S,
    )


def gpus() -> int:
    return len(nvidia_smi.query("gpu", ["uuid"]))


@pytest.mark.parametrize("name", ROWS)
def test_the_driver_keeps_its_contract(name: str) -> None:
    if ROWS[name].gpus > gpus():
        pytest.skip(f"needs {ROWS[name].gpus} GPUs")
    done = run_row(name)
    assert done.returncode == 0, done.stderr


def main(names: list[str]) -> None:
    """Every row, or those named; ends with 1 when one does not hold."""
    count, failed = gpus(), 0
    for name in names or list(ROWS):
        if ROWS[name].gpus > count:
            verdict, words = "skipped", f"needs {ROWS[name].gpus} GPUs"
        else:
            started = time.monotonic()
            try:
                done = run_row(name)
                verdict = "ok" if done.returncode == 0 else "FAILED"
                words = f"{time.monotonic() - started:.1f} s  " + "".join(done.stderr.splitlines()[-1:])
            except subprocess.TimeoutExpired as late:
                verdict, words = "FAILED", str(late)
            failed += verdict == "FAILED"
        sys.stdout.write(f"{verdict:8} {name}  {words}\n")
        sys.stdout.flush()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])

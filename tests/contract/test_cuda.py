"""The driver's contract over the stub libcuda: every row that the code relies on, each on a node of its own.

tests/gpu/test_driver_contract.py runs the same rows on real GPUs; a stub is trusted as far as the two agree.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.progress import ROWS
from tests.patience import HANG_S
from tests.stubs.cuda.node import GIB, CudaNode
from tests.wide import quick_first

REPO = Path(__file__).resolve().parents[2]
# A row that only watches or waits for a queue takes 2 s; the rest is a busy machine.
ROW_S = HANG_S


@pytest.fixture
def folder(socket_dir: Path) -> Path:
    """A directory that other users can enter: one row calls as another user."""
    socket_dir.chmod(0o755)
    return socket_dir


def run_row(name: str, node: CudaNode) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **node.environment(), **node.nvml(node.folder / "nvml-scenario").environment()}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), str(REPO / "client")])
    return subprocess.run(
        [sys.executable, "-m", "tests.stubs.cuda.rig", name],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=ROW_S,
    )


@pytest.mark.contract
@pytest.mark.parametrize("name", quick_first(ROWS, 1))
def test_the_stub_keeps_the_drivers_contract(name: str, folder: Path) -> None:
    done = run_row(name, CudaNode.make(folder, gpus=max(2, ROWS[name].gpus), gpu_bytes=4 * GIB))
    assert done.returncode == 0, done.stderr


# A driver that breaks the contract, by the row that has to notice.
BROKEN = {
    "states_follow_each_other_and_a_restore_ends_locked": "error step:unlock 401",
    "the_wrong_order_changes_nothing": "error step:unlock 999",
    "a_map_moves_a_process_and_back": "lose step:restore 801",
    "a_restore_without_memory_destroys_the_job": "error step:restore 304",
    "held_memory_outlives_its_maker_and_its_last_descriptor_frees_it": "error cuMemImportFromShareableHandle 1",
    "another_process_copies_out_and_in_by_handles": "error cuMemcpyDtoHAsync_v2 1",
    "allocating_needs_no_context_and_refuses_missing_devices": "error cuMemCreate 1",
    "an_exited_process_differs_from_one_without_cuda": "error cuCheckpointProcessGetState 304",
}


@pytest.mark.contract
@pytest.mark.thorough
@pytest.mark.parametrize("name", BROKEN)
def test_a_row_fails_on_a_driver_that_breaks_it(name: str, folder: Path) -> None:
    node = CudaNode.make(folder, gpu_bytes=4 * GIB)
    node.order(BROKEN[name])
    done = run_row(name, node)
    assert done.returncode
    assert "ContractBroken" in done.stderr or "CudaError" in done.stderr, done.stderr

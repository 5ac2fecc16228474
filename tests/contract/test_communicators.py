"""Ranks of torchrun whose groups are disconnected and connected again train on, bit for bit as if nothing had happened.

The ranks run real PyTorch on gloo, which the agent handles by the calls that it has for NCCL. What they do and check is
in `grouped`: DDP, FSDP2, a device mesh, `new_group`, functional collectives, a rank that does not come, pending work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG_S

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("ranks")]
pytest.importorskip("torch", reason="torch is not installed; `tools/setup.sh full` installs it")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_training_whose_groups_were_replaced_has_the_losses_of_an_undisturbed_one(ranks: int, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ran = subprocess.run(
        [*launcher, "-m", "tests.contract.grouped", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
        check=False,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(rank) for rank in range(ranks)], ran.stderr[-4000:]

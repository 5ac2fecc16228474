"""Ranks whose groups are disconnected and connected again train on, bit for bit as if nothing had happened.

The ranks run real PyTorch on gloo, which the agent handles by the calls that it has for NCCL. `grouped` has what they
do and check: DDP, FSDP2, a device mesh, `new_group`, functional collectives, a rank that does not come, pending work.
Suspending is tried over a stub of NCCL, with a stub of PyTorch's part (`suspended`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from tests.patience import HANG_S
from tests.stubs.build import build_stub
from tests.wide import telling

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("ranks")]

ROOT = Path(__file__).resolve().parents[2]
GROUPED = str(ROOT / "tests/contract/grouped.py")


@pytest.mark.parametrize("ranks", telling([(2,), (3,)], [(3,)]))
def test_a_training_whose_groups_were_replaced_has_the_losses_of_an_undisturbed_one(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed; `tools/setup.sh full` installs it")
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests/e2e/ranks_alone.py"), str(ranks), GROUPED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
        check=False,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(rank) for rank in range(ranks)], ran.stderr[-4000:]


@pytest.mark.wide
@pytest.mark.parametrize("version", ["2.4.1", "2.8.0", "newest"])
def test_the_same_holds_for_other_releases_of_pytorch(version: str, tmp_path: Path) -> None:
    """Issue 16, outcome 7: the private calls that replace a backend, in the oldest release, one between, Debian's."""
    of_release = ROOT / "build" / "torches" / version / "bin" / "python"
    python = of_release if version != "newest" else ROOT / "build" / "pythons" / "bin" / "python3.14-torch"
    if not python.exists():
        fetches = "tools/pythons.sh --torch" if version == "newest" else f"tools/torches.sh {version}"
        pytest.skip(f"PyTorch {version} is not here; {fetches} fetches it")
    packages, ended = tmp_path / "packages", tmp_path / "ended"
    packages.mkdir()
    ended.mkdir()
    (packages / "msgpack").symlink_to(Path(msgpack.__file__).parent)
    ran = subprocess.run(
        [str(python), str(ROOT / "tests/e2e/ranks_alone.py"), "2", GROUPED, str(ended)],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{packages}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "USE_LIBUV": "0",  # which Debian's build does not have
        },
        capture_output=True,
        text=True,
        timeout=4 * HANG_S,
        check=False,
    )
    assert sorted(path.name for path in ended.iterdir()) == ["0", "1"], ran.stderr[-4000:]


def test_nccls_communicators_are_suspended_and_replaced_on_all_ranks_after_one_has_failed(tmp_path: Path) -> None:
    library = build_stub("nccl", tmp_path)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.contract.suspended", str(tmp_path), str(rank), str(library)],
            cwd=ROOT,
            env={**os.environ, "NCCL_NVLS_ENABLE": "0", "HEGM_NCCL_STUB_LOG": str(tmp_path / f"calls{rank}")},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    output = [rank.communicate(timeout=2 * HANG_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(output)

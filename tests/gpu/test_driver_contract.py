"""The driver's contract on real GPUs: the rows that tests/contract/test_cuda.py runs over the stub, each as a process.

`python3 -m tests.gpu.driver_run` does the same as one command with a table, for a machine that has no pytest.
"""

from __future__ import annotations

import pytest

from tests.gpu import nvidia_smi
from tests.gpu.driver_run import ROW_S, run_row
from tests.kit.progress import ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.contract,
    pytest.mark.timeout(ROW_S + 10),
    pytest.mark.skipif(not nvidia_smi.is_there(), reason="no nvidia-smi here"),
]


@pytest.mark.parametrize("name", ROWS)
def test_the_driver_keeps_its_contract(name: str) -> None:
    if ROWS[name].gpus > len(nvidia_smi.query("gpu", ["uuid"])):
        pytest.skip(f"needs {ROWS[name].gpus} GPUs")
    done = run_row(name)
    assert done.returncode == 0, done.stderr

"""The modules that the next process may import before its turn, as the exiting process reports them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.patience import HANG_S

ASKED = """
import os, sys
from types import ModuleType
from hegmd.agent.state.prestart import beforehand

def modules():
    return list(beforehand().modules)

told = [modules()]
for name in ("os.path", "torch", "numpy", "numpy.linalg", "torch.nn", "torchvision", "torch.utils.tensorboard.writer"):
    sys.modules.setdefault(name, ModuleType(name))
told.append(modules())
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["HEGM_RESTART"] = "set by PyTorch and by hegmd"
told.append(modules())
told.append(beforehand().path == tuple(sys.path))
os.environ["OMP_NUM_THREADS"] = "3"
told.append(modules())
del os.environ["OMP_NUM_THREADS"]
told.append(modules())
del os.environ["GIVEN"]
told.append(modules())
os.environ.update(GIVEN="1", RANK="0")
told.append(modules())
print(told)
"""


def test_only_pytorch_and_only_while_the_environment_is_the_one_that_it_began_with() -> None:
    """A variable that a script sets before it imports PyTorch is meant to be seen by it."""
    root = Path(__file__).parents[4]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "GIVEN": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env=environ, capture_output=True, text=True, check=True, timeout=HANG_S
    )
    known = ["torch", "numpy", "torch.nn"]
    assert ast.literal_eval(done.stdout) == [[], known, known, True, [], known, [], []]

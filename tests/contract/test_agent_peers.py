"""An agent disables peer access between its process's GPUs: over the stub driver and a stub of PyTorch.

The stub requests peer access as PyTorch does on real GPUs at its first copy between two of them, and counts its
requests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG_S
from tests.stubs.cuda.node import CudaNode

ROOT = Path(__file__).parents[2]
# A process on two GPUs that have access to each other, with a stub of PyTorch. The test appends code that prints what
# it sees.
SCRIPT = """
import sys, types
from tests.stubs.cuda.program import Program, cuda
from hegmd.agent.peers import Peers
from hegmd.errors import HegmError

program = Program([0, 1], [1, 1])
copies, waited, given_back = [], [], []
ENABLED, NOT_ENABLED = 704, 705

def reached():
    # Which of the two pairs have access: it is asked for again, and undone where it was not there before.
    answers = []
    for one, other in ((0, 1), (1, 0)):
        cuda.cuCtxSetCurrent(program.contexts[one])
        code = cuda.cuCtxEnablePeerAccess(program.contexts[other], 0)
        answers.append(code == ENABLED)
        if code != ENABLED:
            cuda.cuCtxDisablePeerAccess(program.contexts[other])
    cuda.cuCtxSetCurrent(program.contexts[0])
    return answers

class Tensor:
    def __init__(self, device):
        self.device = int(device.partition(":")[2])
    def to(self, device):
        other = int(device.partition(":")[2])
        copies.append((self.device, other))
        cuda.cuCtxSetCurrent(program.contexts[self.device])
        cuda.cuCtxEnablePeerAccess(program.contexts[other], 0)  # at the first copy; that it is there is no error
        cuda.cuCtxSetCurrent(program.contexts[0])

torch = types.ModuleType("torch")
torch.zeros = lambda count, device: Tensor(device)
torch.cuda = types.SimpleNamespace(
    is_initialized=lambda: True,
    get_allocator_backend=lambda: ALLOCATOR,
    memory_snapshot=lambda: [],
    synchronize=waited.append,
    empty_cache=lambda: given_back.append("cache"),
)
torch._C = types.SimpleNamespace(_cuda_clearCublasWorkspaces=lambda: given_back.append("workspaces"))
ALLOCATOR = "native"
sys.modules["torch"] = torch
peers = Peers()
"""


def printed(node: CudaNode, script: str) -> list[str]:
    """Return what a process on that node prints."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "client"), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT + script],
        env={**os.environ, **node.environment(), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.thorough
def test_access_is_undone_and_had_again_for_the_pairs_that_had_it(node: CudaNode) -> None:
    lines = printed(
        node,
        """
program.reach()
print(peers.part(), reached())
peers.rejoin()
print(reached(), sorted(copies), sorted(set(waited)), given_back)
peers.rejoin()
print(reached())
""",
    )
    assert lines[0] == "2 [False, False]"
    assert lines[1] == "[True, True] [(0, 1), (1, 0)] [0, 1] ['workspaces', 'cache']"
    assert lines[2] == "[True, True]"


@pytest.mark.thorough
def test_peer_access_is_refused_only_after_pytorch_requested_it_once(node: CudaNode) -> None:
    """It asks at its first copy between two GPUs, and fails permanently if the driver refuses, as after a restore."""
    lines = printed(node, "print(reached(), peers.part(), copies, reached()); peers.part(); print(reached())")
    assert lines[0] == "[False, False] 2 [(0, 1), (1, 0)] [False, False]"
    assert lines[1] == "[False, False]"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("order", "why"),
    [("error cuCtxDisablePeerAccess 1 2 2", "cuCtxDisablePeerAccess"), ("error cuDeviceCanAccessPeer 999", "999")],
)
def test_the_first_pair_stayed_without_access_if_the_second_could_not_be_undone(
    node: CudaNode, order: str, why: str
) -> None:
    """The job stayed where it was, and a kernel of its own that reads another GPU would have failed there."""
    node.order(order)
    lines = printed(
        node,
        """
program.reach()
try:
    peers.part()
except HegmError as error:
    print(error.code.name, error.message, "|", error.hint)
print(cuda.cuCtxEnablePeerAccess(program.contexts[1], 0))
""",
    )
    assert lines[0].startswith("refused ")
    assert why in lines[0]
    assert "it was not changed" in lines[0]
    assert lines[1] == "704", "access is as it was"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('ALLOCATOR = "cudaMallocAsync"', "maps memory of one GPU for the others"),
        ("torch.cuda.is_initialized = lambda: False", "does not use PyTorch on them"),
    ],
)
def test_an_irreversible_request_is_refused_with_nothing_changed(node: CudaNode, script: str, why: str) -> None:
    lines = printed(
        node,
        f"""
program.reach()
{script}
try:
    peers.part()
except HegmError as error:
    print(error.message)
print(copies, reached())
""",
    )
    assert why in lines[0]
    assert lines[1] == "[] [True, True]"


@pytest.mark.thorough
def test_after_a_restore_the_driver_refuses_and_that_stops_nothing(node: CudaNode) -> None:
    lines = printed(
        node,
        """
program.reach()
peers.part()
import os, subprocess, sys
steps = "from hegmd.gpu_helper import cuda; cuda.start(); pid = int(%d); " % os.getpid()
steps += "cuda.lock(pid, 1000); cuda.checkpoint(pid); cuda.restore(pid); cuda.unlock(pid)"
subprocess.run([sys.executable, "-c", steps], check=True)
peers.rejoin()
print(reached())
print(program.digest() == program.digest())
""",
    )
    assert lines == ["[False, False]", "True"]


@pytest.mark.thorough
def test_a_device_is_named_as_the_driver_has_it_now_and_not_as_it_was_at_first(node: CudaNode) -> None:
    """PyTorch continues naming the GPU that a process began on; room held by that name would be on the wrong one."""
    first, second = node.uuids
    lines = printed(
        node,
        f"""
from hegmd.agent.cuda_driver import Driver
print(*[Driver().uuid_of(device) for device in (0, 1)])
import os, subprocess, sys
pairs = [("{first}", "{second}"), ("{second}", "{first}")]
steps = "from hegmd.gpu_helper import cuda; cuda.start(); pid = int(%d); " % os.getpid()
steps += "cuda.lock(pid, 1000); cuda.checkpoint(pid); cuda.restore(pid, %r); cuda.unlock(pid)" % pairs
subprocess.run([sys.executable, "-c", steps], check=True)
print(*[Driver().uuid_of(device) for device in (0, 1)])
""",
    )
    assert lines == [f"{first} {second}", f"{second} {first}"]

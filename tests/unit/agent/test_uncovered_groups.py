"""Groups that the agent cannot disconnect are refused by name; the others are not."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hegmd.agent import uncovered_groups
from hegmd.agent.communicators import ProcessGroups
from hegmd.agent.group_backend import GroupBackend
from hegmd.agent.nccl_library import Library
from tests.stubs.build import build_stub

# A library that a test has loaded stays mapped.
_COPIES = "copies of NCCL are loaded"


class _ProcessGroupWrapper:
    """Like the class with TORCH_DISTRIBUTED_DEBUG=DETAIL."""


class ProcessGroupUCC:
    """A backend that is neither NCCL nor gloo."""


class ProcessGroupNCCL:
    """A backend without communicators; `shares` is NCCL's split_share."""

    def __init__(self, shares: int = -(2**31)) -> None:
        self.options = SimpleNamespace(config=SimpleNamespace(split_share=shares))

    def _comm_ptr(self) -> int:
        return 0


class MemPool:
    """A pool with an allocator of its own, or without."""

    def __init__(self, allocator: object) -> None:
        self.allocator = allocator


def torch_of(*pools: tuple[int, int]) -> Any:
    """Return a stub of PyTorch whose allocator has segments in these pools."""
    segments = [{"address": 0, "total_size": 1, "device": 0, "stream": 0, "segment_pool_id": pool} for pool in pools]
    cuda = SimpleNamespace(
        device_count=lambda: 0,
        MemPool=MemPool,
        get_allocator_backend=lambda: "native",
        memory_snapshot=lambda: segments,
    )
    prefixed = SimpleNamespace(PrefixStore=lambda _prefix, store: store)
    return SimpleNamespace(cuda=cuda, _C=None, distributed=prefixed, nn=SimpleNamespace(DataParallel=ProcessGroupUCC))


def reasons(
    backend: Any, torch: Any | None = None, library: Library | None = None, alive: list[Any] | None = None
) -> list[str]:
    of: Any = SimpleNamespace(group_name="7", bound_device_id=None, rank=lambda: 0, size=lambda: 2)
    torch = torch or torch_of()
    group = GroupBackend(torch, of, SimpleNamespace(check=lambda _keys: False), backend, [SimpleNamespace(type="cuda")])
    return [reason for reason in uncovered_groups.reasons(torch, [group], library, alive) if _COPIES not in reason]


def test_a_plain_group_of_nccl_is_covered() -> None:
    assert reasons(ProcessGroupNCCL()) == []


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (_ProcessGroupWrapper(), "group 7 is wrapped by TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        (ProcessGroupUCC(), "group 7 uses ProcessGroupUCC"),
        (ProcessGroupNCCL(shares=1), "group 7 shares resources"),
    ],
)
def test_a_group_that_cannot_be_disconnected_is_named(backend: Any, says: str) -> None:
    (reason,) = reasons(backend)
    assert reason.startswith(says)


@pytest.mark.parametrize("name", ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_COMM_SPLIT_SHARE_RESOURCES"])
def test_a_setting_that_ties_memory_to_communicators_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    (reason,) = reasons(ProcessGroupNCCL())
    assert name in reason


@pytest.fixture
def agents() -> Iterator[list[object]]:
    """The RPC agents of this process, without a process group."""
    module, found = ModuleType("torch.distributed.rpc.api"), list[object]()
    module.__dict__["_is_current_rpc_agent_set"] = lambda: bool(found)
    names = (module.__name__, "torch.distributed.distributed_c10d")
    known = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules[module.__name__] = module
    yield found
    del sys.modules[module.__name__]
    sys.modules.update(known)


def test_a_job_that_uses_rpc_was_moved_and_its_calls_waited_for_parked_ranks(agents: list[object]) -> None:
    """It may have no process group at all."""
    assert reasons(ProcessGroupNCCL()) == []
    assert ProcessGroups().inventory() is None
    agents.append(object())
    (reason,) = reasons(ProcessGroupNCCL())
    assert reason.startswith("torch.distributed.rpc is in use")
    found = ProcessGroups().inventory()
    assert found is not None
    assert found.uncovered == (reason,)


def test_only_a_pool_with_an_allocator_of_its_own_may_be_registered() -> None:
    plain = MemPool(None)
    assert reasons(ProcessGroupNCCL()) == []
    own = MemPool(plain)
    (reason,) = reasons(ProcessGroupNCCL())
    assert "MemPool" in reason
    del own


def test_a_captured_graph_needs_an_nccl_that_can_suspend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = str(build_stub("nccl", tmp_path))
    ctypes.CDLL(built)
    assert reasons(ProcessGroupNCCL(), torch_of((0, 1)), Library(built)) == []
    monkeypatch.setenv("HEGM_NCCL_STUB_VERSION", "22809")
    (reason,) = reasons(ProcessGroupNCCL(), torch_of((0, 1)), Library(built))
    assert "NCCL 2.28.9 cannot suspend" in reason


def test_a_second_copy_of_nccl_is_another_librarys(tmp_path: Path) -> None:
    known = set(uncovered_groups.loaded())
    copies: list[str] = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        copies.append(str(build_stub("nccl", tmp_path / str(number))))
        ctypes.CDLL(copies[-1])
    assert set(uncovered_groups.loaded()) - known == set(copies)
    group: Any = SimpleNamespace(kind="nccl", name="7", config=None, can_suspend=lambda _: True, gpus=lambda: [0])
    (reason,) = uncovered_groups.reasons(torch_of(), [group], None)
    assert _COPIES in reason
    assert copies[1] in reason


def test_the_copy_of_pytorchs_wheel_is_not_used_beside_a_preloaded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = set(uncovered_groups.loaded())
    copies: list[str] = []
    for folder in ("newer", "site-packages/nvidia/nccl/lib"):
        (tmp_path / folder).mkdir(parents=True)
        copies.append(str(build_stub("nccl", tmp_path / folder)))
        ctypes.CDLL(copies[-1])
    assert set(uncovered_groups.loaded()) - known == set(copies)
    monkeypatch.setenv("LD_PRELOAD", f"/usr/lib/libother.so:{copies[0]}")
    assert set(uncovered_groups.loaded()) - known == {copies[0]}


PYNCCL = "vllm.distributed.device_communicators.pynccl"


@pytest.fixture
def pynccl() -> Iterator[type[object]]:
    """The class that vLLM has for communicators of its own, imported."""
    module, kind = ModuleType(PYNCCL), type("PyNcclCommunicator", (), {})
    module.__dict__["PyNcclCommunicator"] = kind
    sys.modules[PYNCCL] = module
    yield kind
    del sys.modules[PYNCCL]


def test_communicators_of_vllm_are_named_while_there_are_any(pynccl: type[object]) -> None:
    assert reasons(ProcessGroupNCCL()) == []
    one = pynccl()
    (reason,) = reasons(ProcessGroupNCCL())
    assert PYNCCL in reason
    del one


def test_each_survey_of_ranks_looked_at_all_objects_twice(pynccl: type[object]) -> None:
    """Each look takes 50 ms while all ranks are parked: the survey of the storages finds these objects too."""
    found, torch = [pynccl()], torch_of()
    assert pynccl in uncovered_groups.kinds(torch)
    assert reasons(ProcessGroupNCCL(), torch, alive=[]) == [], "nothing is looked for again"
    (reason,) = reasons(ProcessGroupNCCL(), torch, alive=found)
    assert PYNCCL in reason

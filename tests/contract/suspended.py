"""One of two ranks with NCCL groups, over the stub library and a stub of PyTorch: FOLDER RANK LIBRARY.

Its groups are suspended and resumed; then one rank's NCCL fails, and all get new backends. PyTorch's groups and stores
are replaced here by doubles; the agent's code is the real one. Ends with 0 once all checks of the rank have passed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hegmd.agent.communicators import ProcessGroups
from hegmd.agent.group_backend import ABORTED, SUSPENDED, UNKNOWN, UP
from hegmd.agent.trap import NoCollection
from hegmd.errors import HegmError

RANKS, LIMIT_S = 2, 100.0
folder, rank = Path(sys.argv[1]), int(sys.argv[2])


class Store:
    """Keys are files."""

    def __init__(self, prefix: str = "", _of: object = None) -> None:
        self._prefix: str = (_of._prefix if isinstance(_of, Store) else "") + prefix

    def _file(self, key: str) -> Path:
        return folder / (self._prefix + key).replace("/", "~")

    def set(self, key: str, value: str) -> None:
        beside = self._file(f"{key}.{rank}")
        beside.write_text(value)
        beside.replace(self._file(key))

    def check(self, keys: list[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._file(key).read_bytes() for key in keys]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]


class Options:
    """Those of a backend."""

    _timeout = 1800


class ProcessGroupNCCL:
    """Has a communicator, until it is aborted."""

    made = 0

    def __init__(self, *_place: object) -> None:
        type(self).made += 1
        self.communicator, self.options = self.made, Options()

    def _comm_ptr(self) -> int:
        return self.communicator

    def _get_sequence_number_for_group(self) -> int:
        return 5

    def abort(self) -> None:
        self.communicator = 0

    def allreduce(self, tensors: list[Any]) -> Any:
        tensors[0].value = RANKS
        return SimpleNamespace(wait=lambda: None)


class Group:
    """A ProcessGroup: it keeps the backend of a type that it knows."""

    bound_device_id = None

    def __init__(self, name: str) -> None:
        self.group_name, self.group_desc = name, ""
        self._device_types = [SimpleNamespace(type="cuda")]
        self._types: dict[int, object] = {}
        self.backend: Any = ProcessGroupNCCL()

    def rank(self) -> int:
        return rank

    def size(self) -> int:
        return RANKS

    def _get_backend(self, _device: object) -> Any:
        return self.backend

    def _register_backend(self, _device: object, kind: int, backend: object) -> None:
        self.backend = self._types.setdefault(kind, backend)


class Current:
    """The current device: there is one."""

    def __init__(self, _number: int) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def stand_in(groups: list[Group]) -> None:
    """Have the agent find PyTorch with these groups."""
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        memory_reserved=lambda _: 1,
        device=Current,
        synchronize=lambda _: None,
        get_allocator_backend=lambda: "native",
        memory_snapshot=list,
    )
    torch.device = lambda kind, index=None: SimpleNamespace(type=kind, index=index)
    torch.ones = lambda *_, device: SimpleNamespace(item=lambda: RANKS, device=device)
    torch.nn, torch._C = SimpleNamespace(DataParallel=Options), None
    group_class = SimpleNamespace(BackendType=int)
    torch.distributed = SimpleNamespace(PrefixStore=Store, ProcessGroup=group_class)
    world: Any = ModuleType("torch.distributed.distributed_c10d")
    world.is_initialized = lambda: True
    world._world = SimpleNamespace(pg_map={group: ("nccl", Store(f"{group.group_name}/")) for group in groups})
    world._get_default_group = lambda: groups[0]
    sys.modules.update({"torch": torch, world.__name__: world})


def states(groups: ProcessGroups) -> set[str]:
    return {group.state for group in groups._known}


def main() -> None:
    ctypes.CDLL(sys.argv[3])
    known = [Group("1"), Group("0")]
    stand_in(known)
    groups = ProcessGroups()
    inventory = groups.inventory()
    assert inventory is not None
    assert (inventory.mechanism, inventory.groups, inventory.library, inventory.uncovered) == (
        "suspend",
        2,
        "2.29.7",
        (),
    ), inventory
    for generation in range(3):
        groups.disconnect(LIMIT_S)
        assert states(groups) == {SUSPENDED}
        groups.reconnect(generation, LIMIT_S)
        assert states(groups) == {UP}
    calls = (folder / f"calls{rank}").read_text().splitlines()
    # In the order of their names on all ranks, whatever the order in which they were made.
    assert calls == ["suspend 2 0", "suspend 1 0", "resume 2 0", "resume 1 0"] * 3, calls
    if rank == 1:
        os.environ["HEGM_NCCL_STUB_FAILS"] = "3"
    with NoCollection():
        with pytest.raises(HegmError, match="ncclCommSuspend answered 3") as raised:
            groups.disconnect(LIMIT_S)
        kept = weakref.ref(raised.value)
        del raised
        assert kept() is None, "the error stays until the garbage collector runs, and keeps all groups"
    os.environ.pop("HEGM_NCCL_STUB_FAILS", None)
    assert groups.is_down
    assert states(groups) == ({SUSPENDED} if rank == 0 else {UNKNOWN, UP})
    before = [group.backend for group in known]
    groups.reconnect(9, LIMIT_S)
    assert states(groups) == {UP}
    assert not groups.is_down
    assert all(group.backend is not old for group, old in zip(known, before, strict=True))
    assert ABORTED not in states(groups)


if __name__ == "__main__":
    main()

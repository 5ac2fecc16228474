"""Finds what the agent cannot disconnect, each with the group and the reason. The driver would lose a job that has any.

Reads what the process has loaded and its live objects. Imports nothing and changes nothing. A reason is a sentence.
"""

from __future__ import annotations

import os
import sys

from . import cuda_state, torch_state
from .group_backend import MAX_REPLACEMENTS, NCCL, GroupBackend

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .nccl_library import Library

_MAPS = "/proc/self/maps"
_NCCL_FILE = "libnccl.so"
_WHEEL_FOLDER = "/nvidia/nccl/lib"
_WRAPPER = "_ProcessGroupWrapper"
# Libraries that connect GPUs on their own, and their products. PyTorch maps libnvshmem_host without using it.
_FOREIGN_FILES = {"deep_ep": "DeepEP", "libmscclpp": "MSCCL++"}
# Classes that hold communicators of their own, by the module that has them.
_FOREIGN_CLASSES = {
    "vllm.distributed.device_communicators.pynccl": ("PyNcclCommunicator",),
    "sglang.srt.distributed.device_communicators.pynccl": ("PyNcclCommunicator",),
    "cupy_backends.cuda.libs.nccl": ("NcclCommunicator",),
    "nvshmem.core": (),
}
# Py_TPFLAGS_HAVE_GC: the collector knows the objects of such a class.
_TRACKED = 1 << 14
_RPC = "torch.distributed.rpc.api"
_SYMMETRIC = "torch.distributed._symmetric_memory"
_REGISTERING = ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK")


def loaded() -> list[str]:
    """Return the paths of all copies of NCCL that this process may use.

    PyTorch loads the copy of its wheel by its path, also if another one is preloaded, which then answers PyTorch's
    calls. Communicators that another library made in the wheel's copy are found by their classes, as without a second
    copy.
    """
    copies = _mapped(_NCCL_FILE)
    preloaded = {os.path.realpath(path) for path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()}
    if preloaded.isdisjoint(copies):
        return copies
    return [path for path in copies if path in preloaded or not path.rpartition("/")[0].endswith(_WHEEL_FOLDER)]


def kinds(torch: Any) -> tuple[type[object], ...]:
    """Return the classes whose objects `reasons` looks at."""
    loaded_classes = [
        getattr(sys.modules[module], name, None)
        for module, names in _FOREIGN_CLASSES.items()
        for name in names
        if module in sys.modules
    ]
    known = [torch.nn.DataParallel, getattr(torch.cuda, "MemPool", None), *loaded_classes]
    return tuple([kind for kind in known if isinstance(kind, type)])


def reasons(
    torch: Any, groups: list[GroupBackend], library: Library | None, alive: list[Any] | None = None
) -> list[str]:
    """Return every reason against disconnecting these groups. Leaves out NVLS, which the daemon detects itself.

    `alive` are the objects of `kinds`, if they were looked for already.
    """
    found = [reason for group in groups for reason in _of_group(group, library)]
    found.extend(of_rpc())
    if any(group.kind == NCCL for group in groups):
        if alive is None:
            alive = [one for several in torch_state.objects_of(*kinds(torch)) for one in several]
        found.extend(_of_process(torch, groups, library, alive))
    return found


def of_rpc() -> list[str]:
    """Return the reason against a job that uses `torch.distributed.rpc`, which has no groups; none for others."""
    rpc = sys.modules.get(_RPC)
    if rpc is None or not getattr(rpc, "_is_current_rpc_agent_set", bool)():
        return []
    return ["torch.distributed.rpc is in use, whose calls to a parked rank do not return"]


def _of_group(group: GroupBackend, library: Library | None) -> Iterator[str]:
    if group.kind == _WRAPPER:
        yield f"group {group.name} is wrapped by TORCH_DISTRIBUTED_DEBUG=DETAIL, whose own groups cannot be replaced"
        return
    if group.kind not in (NCCL, "gloo"):
        yield f"group {group.name} uses {group.kind}, which the agent cannot disconnect"
        return
    if not group.can_suspend(library) and not group.can_be_replaced:
        yield f"group {group.name} was replaced {MAX_REPLACEMENTS} times, and PyTorch has no more backend types"
    if getattr(group.config, "split_share", None) == 1:
        yield f"group {group.name} shares resources with the group that it was split from (split_share)"
    gpus = group.gpus() if group.kind == NCCL else []
    if len(gpus) > 1:
        yield f"group {group.name} has communicators on {len(gpus)} GPUs of one process"


def _of_process(torch: Any, groups: list[GroupBackend], library: Library | None, alive: list[Any]) -> Iterator[str]:
    if os.environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES") == "1":
        yield "NCCL_COMM_SPLIT_SHARE_RESOURCES=1 lets groups share resources, which cannot be ended one by one"
    if any(os.environ.get(name, "0") == "1" for name in _REGISTERING):
        yield f"{_REGISTERING[0]}=1 registers the allocator's memory with the communicators"
    yield from _registered(torch, alive)
    yield from _foreign(torch, alive)
    graphs = not all(group.can_suspend(library) for group in groups) and cuda_state.Segments(torch).graphs
    if graphs:
        version = "this NCCL" if library is None else f"NCCL {library.text}"
        yield f"a CUDA graph was captured and may contain collectives, and {version} cannot suspend communicators"


def _registered(torch: Any, alive: list[Any]) -> Iterator[str]:
    """Yield memory outside the communicators that peers have mapped."""
    symmetric = sys.modules.get(_SYMMETRIC)
    if symmetric is not None and any(
        getattr(symmetric, name, None) for name in ("_group_name_to_store", "_group_name_to_workspace_tensor")
    ):
        yield "symmetric memory is in use, which peers have mapped"
    pool = getattr(torch.cuda, "MemPool", None)
    if any(getattr(one, "allocator", None) is not None for one in alive if type(one) is pool):
        yield "a torch.cuda.MemPool with an allocator of its own is alive, which may be registered with a communicator"


def _foreign(torch: Any, alive: list[Any]) -> Iterator[str]:
    """Yield communicators that torch.distributed does not list."""
    mapped = {path: path.rpartition("/")[2] for path in _mapped(*_FOREIGN_FILES)}
    copies = loaded()
    if len(copies) > 1:
        yield f"{len(copies)} copies of NCCL are loaded ({', '.join(copies)}), so another library has communicators"
    for path, name in mapped.items():
        for start, owner in _FOREIGN_FILES.items():
            if name.startswith(start):
                yield f"{owner} is loaded ({path}), which connects GPUs by itself"
    for module, names in _FOREIGN_CLASSES.items():
        if module in sys.modules and (not names or _is_alive(module, names, frozenset(map(type, alive)))):
            yield f"{module} is in use, which has communicators of its own"
    if cuda_state.is_data_parallel(torch, alive):
        yield "torch.nn.DataParallel is in use, whose communicators PyTorch does not list"


def _is_alive(module: str, names: tuple[str, ...], alive: frozenset[type[object]]) -> bool:
    """Return True if an object of one of these classes exists, or may exist."""
    known = [getattr(sys.modules[module], name, None) for name in names]
    tracked = [kind for kind in known if isinstance(kind, type) and kind.__flags__ & _TRACKED]
    return len(tracked) < len(names) or any(kind in alive for kind in tracked)


def _mapped(*names: str) -> list[str]:
    """Return the paths of mapped files whose names start with one of these."""
    found: dict[str, None] = {}
    starts = tuple(name.encode() for name in names)
    try:
        with open(_MAPS, "rb") as maps:
            for line in maps:
                path = line.rstrip().partition(b"/")[2]
                if path.rpartition(b"/")[2].startswith(starts):
                    found["/" + path.decode(errors="surrogateescape")] = None
    except OSError:
        return []
    return list(found)

"""The gradient buckets of DistributedDataParallel: as large as all gradients, and known to C++ only.

Python makes and rebuilds a Reducer, and the Reducer allocates its buckets in those two calls. A dispatch mode around
them sees the allocations; the calls themselves do what they do otherwise. A Reducer rebuilds its buckets once, so a
training step pays for it once.

Only tensors refer to a bucket. They find its bytes through the storage, so the agent can move it although it has owners
outside of Python.
"""

from __future__ import annotations

import sys

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Weak references to the storages: PyTorch's own kind, as an address that it must be given back.
_buckets: list[int] = []


def watch(_module: Any) -> None:
    """Have each Reducer that is made from now on note its buckets. `_module` has DistributedDataParallel."""
    distributed: Any = sys.modules.get("torch.distributed")
    reducer = getattr(distributed, "Reducer", None)
    if reducer is None:  # this PyTorch was built without torch.distributed
        return

    def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: N807 - of the class below
        self._hegm_is_final = False
        _noting(lambda: reducer.__init__(self, *args, **named))

    def _rebuild_buckets(self: Any) -> bool:
        if self._hegm_is_final:
            return bool(reducer._rebuild_buckets(self))
        self._hegm_is_final = bool(_noting(lambda: reducer._rebuild_buckets(self)))
        return bool(self._hegm_is_final)

    _rebuild_buckets.__dict__["_torchdynamo_disable"] = True
    kept = {name: getattr(reducer, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods = {"__init__": __init__, "_rebuild_buckets": _rebuild_buckets}
    distributed.Reducer = type(reducer.__name__, (reducer,), {**kept, **methods})


def storages(torch: Any) -> list[Any]:
    """The buckets that still exist."""
    found: list[Any] = []
    for weak in tuple(_buckets):
        storage = torch.UntypedStorage._new_with_weak_ptr(weak)
        if storage is None:
            _buckets.remove(weak)
            torch.UntypedStorage._free_weak_ref(weak)
        else:
            found.append(storage)
    return found


def _noting(call: Callable[[], Any]) -> Any:
    """Call it, and note every storage that it allocates."""
    mode: Any = getattr(sys.modules.get("torch.utils._python_dispatch"), "TorchDispatchMode", None)
    if mode is None:
        note("this PyTorch has no dispatch modes, so the gradient buckets stay unknown")
        return call()
    empty = sys.modules["torch"].ops.aten.empty.memory_format

    def __torch_dispatch__(  # noqa: N807 - of the class below
        _self: Any, operator: Any, _types: Any, args: Any = (), named: Any = None
    ) -> Any:
        made = operator(*args, **(named or {}))
        if operator is empty:
            _buckets.append(made.untyped_storage()._weak_ref())
        return made

    with type("Noting", (mode,), {"__torch_dispatch__": __torch_dispatch__})():
        return call()

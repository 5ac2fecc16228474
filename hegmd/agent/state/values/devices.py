"""Chooses the device of a restored tensor, in a process that can have other devices than the one that saved it.

Parameters and buffers stay where the new script put its modules, and an optimizer's state follows its parameter. Other
tensors go to a device of the type that they were on, if there is one: to the GPU where the parameters are now that were
beside them, since a process can use several. The script chooses how optimizer steps are computed, possibly by the
device.
"""

from __future__ import annotations

import sys

from ..storage import tensors
from .duck_types import is_a

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

CPU, CUDA = "cpu", "cuda"
#: The options that choose PyTorch's implementation of a group's step. Not every device has all implementations.
IMPLEMENTATION = ("foreach", "fused", "capturable")
#: PyTorch keeps this on the CPU, wherever the parameter is, except in implementations that read it on the device.
_STEP = "step"


#: For each GPU with tensors of the state, the GPU where the script has put these now.
_places: dict[Any, Any] = {}


def learn_places(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Learn which GPU of this process is in the place of which former one. Pairs are (before, here)."""
    found: dict[Any, set[Any]] = {}
    for before, here in pairs:
        if (was_on := tensors.was_on(before)).type == here.device.type == CUDA:
            found.setdefault(was_on, set()).add(here.device)
    _places.clear()
    _places.update({was_on: next(iter(now)) for was_on, now in found.items() if len(now) == 1})


def device_like(was_on: Any) -> Any:
    """Return a device of the former type if this process has one, possibly with another number."""
    torch: Any = sys.modules["torch"]
    if was_on.type != CUDA:
        return was_on
    if was_on in _places:
        return _places[was_on]
    if not torch.cuda.is_available():
        return torch.device(CPU)
    if keeps_number(was_on, torch.cuda.device_count()):
        return was_on
    return torch.device(CUDA, torch.cuda.current_device())


def keeps_number(was_on: Any, count: int) -> bool:
    """Return True for a GPU without parameters, beside others that have some, if this process has one of its number."""
    return bool(_places) and was_on not in _places.values() and was_on.index < count


def device_beside(saved: Any, here: Any, *, from_cpu: bool) -> Any:
    """Return the device for a tensor in place of the script's `here`; `from_cpu`: it trained on the CPU before."""
    torch: Any = sys.modules["torch"]
    was_on = tensors.was_on(saved)
    like = device_like(was_on)
    if was_on in _places:
        return like
    if is_a(here, torch.Tensor) and (here.device.type == like.type or (from_cpu and like.type == CPU)):
        return here.device
    return like


def device_of_state(name: Any, was_on: Any, group: dict[str, Any], kind: str, device: Any) -> Any:
    """Return the device of an entry in an optimizer's state, whose parameter was on that type of device."""
    if kind == device.type:  # tensors beside the parameter stay beside it; counts that were on the CPU stay there
        return device if was_on.type == kind else CPU
    if name == _STEP:
        return device if group.get("capturable") or group.get("fused") else CPU
    return device


def left_cpu(pairs: Iterable[tuple[Any, Any]]) -> bool:
    """Return True if all tensors of the modules were on the CPU and some are on a GPU now. Pairs are (before, here)."""
    kinds = {(tensors.was_on(before).type, here.device.type) for before, here in pairs}
    return bool(kinds) and all(was == CPU for was, _is in kinds) and any(now == CUDA for _was, now in kinds)

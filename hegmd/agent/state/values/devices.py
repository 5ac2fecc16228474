"""Chooses the device of a restored tensor, in a process that can have other devices than the one that saved it.

Parameters and buffers stay where the new script put its modules, and an optimizer's state follows its parameter. Other
tensors go to a device of the type that they were on, if there is one. The script chooses how optimizer steps are
computed, possibly by the device.
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
#: Of a group of parameters: which of PyTorch's implementations computes its step. Not all of them are for every device.
IMPLEMENTATION = ("foreach", "fused", "capturable")
#: PyTorch keeps this on the CPU, wherever the parameter is, except in implementations that read it on the device.
_STEP = "step"


def device_like(was_on: Any) -> Any:
    """Return a device of the former type if this process has one, possibly with another number."""
    torch: Any = sys.modules["torch"]
    if was_on.type == CUDA and torch.cuda.is_available():
        return torch.device(CUDA, torch.cuda.current_device())
    return torch.device(CPU) if was_on.type == CUDA else was_on


def device_beside(saved: Any, here: Any, *, from_cpu: bool) -> Any:
    """Return the device for a tensor in place of the script's `here`; `from_cpu`: it trained on the CPU before."""
    torch: Any = sys.modules["torch"]
    like = device_like(tensors.was_on(saved))
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

"""On which device a tensor of a state is to be, in a process that may have other devices than the one that left it.

Owns that rule. Parameters and buffers are where the new script has put its modules, and what an optimizer has beside a
parameter goes with that. What lies by itself is on a device of the kind that it was on, where there is one. How the
step of an optimizer is computed is the script's choice, which it may make by the device.
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
#: What PyTorch keeps on the CPU wherever its parameter is, but for the implementations that read it on the device.
_STEP = "step"


def device_like(was_on: Any) -> Any:
    """A device of the kind that a tensor was on, where this process has one: it may be another one's number now."""
    torch: Any = sys.modules["torch"]
    if was_on.type == CUDA and torch.cuda.is_available():
        return torch.device(CUDA, torch.cuda.current_device())
    return torch.device(CPU) if was_on.type == CUDA else was_on


def device_beside(saved: Any, here: Any, *, from_cpu: bool) -> Any:
    """The device for a tensor in the place of what the script has there; `from_cpu` it trained on the CPU before."""
    torch: Any = sys.modules["torch"]
    like = device_like(tensors.was_on(saved))
    if is_a(here, torch.Tensor) and (here.device.type == like.type or (from_cpu and like.type == CPU)):
        return here.device
    return like


def device_of_state(name: Any, was_on: Any, group: dict[str, Any], kind: str, device: Any) -> Any:
    """The device for what an optimizer has by that name beside a parameter, which was on that kind of device."""
    if kind == device.type:  # what was beside it is again; counts that were on the CPU stay there
        return device if was_on.type == kind else CPU
    if name == _STEP:
        return device if group.get("capturable") or group.get("fused") else CPU
    return device


def left_cpu(pairs: Iterable[tuple[Any, Any]]) -> bool:
    """Whether the tensors of modules were all on the CPU, and some are on a GPU now; pairs of those before and here."""
    kinds = {(tensors.was_on(before).type, here.device.type) for before, here in pairs}
    return bool(kinds) and all(was == CPU for was, _is in kinds) and any(now == CUDA for _was, now in kinds)

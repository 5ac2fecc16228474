"""Models over several ranks, and tensors that are spread over them (DTensor): a rank's part, and its layout.

A state has the part as an ordinary tensor, beside its layout as plain values. The part is restored into a DTensor that
the new script has made, or becomes a new DTensor on the same device mesh. A layout that cannot be made again is left as
it is: the encoder refuses a DTensor by its name.
"""

from __future__ import annotations

import sys

from .duck_types import class_of, is_a

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType
    from typing import Any

#: Names by which a script has DDP skip the sum of gradients over ranks.
_SKIPPING = frozenset(("no_sync", "require_backward_grad_sync"))
_STATES = "torch.distributed._composable_state"
_LAYOUT, _PART = "__layout__", "__part__"
_MODULES = ("torch.distributed.tensor", "torch.distributed._tensor")
#: The arguments of each placement that can be made again.
_ARGUMENTS = {"Shard": ("dim",), "_StridedShard": ("dim", "split_factor"), "Replicate": (), "Partial": ("reduce_op",)}


def is_spread(value: Any) -> bool:
    """Return True for a DTensor."""
    kind: Any = next((getattr(sys.modules[name], "DTensor", None) for name in _MODULES if name in sys.modules), None)
    return kind is not None and is_a(value, kind)


def local(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, in the same memory, and any other tensor unchanged."""
    return tensor._local_tensor if is_spread(tensor) else tensor


def layout_of(tensor: Any) -> Any:
    """Return how a DTensor is spread, as plain values; None for other tensors and unknown layouts."""
    if not is_spread(tensor):
        return None
    placements: list[Any] = []
    for placement in tensor.placements:
        name = type(placement).__name__
        if name not in _ARGUMENTS:
            return None
        placements.append((name, *(getattr(placement, argument) for argument in _ARGUMENTS[name])))
    mesh = tensor.device_mesh
    if _placed(placements, tensor) != list(tensor.placements):
        return None
    return tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()), tuple(placements), *_form_of(tensor)


def _form_of(tensor: Any) -> tuple[Any, Any]:
    return tuple(tensor.shape), tuple(tensor.stride())


def taken(tensor: Any, beside: Any = None) -> Any:
    """Return a tensor as a state has it: a DTensor as its part and layout, which has to be on the mesh of `beside`."""
    if not is_spread(tensor):
        return tensor.detach()
    layout = layout_of(tensor)
    if layout is None or (beside is not None and not (is_spread(beside) and beside.device_mesh == tensor.device_mesh)):
        return tensor
    return {_LAYOUT: layout, _PART: local(tensor).detach()}


def is_taken(value: Any) -> bool:
    """Return True for what `taken` returns for a DTensor."""
    return is_a(value, dict) and set(value) == {_LAYOUT, _PART}


def part_of(value: Any) -> Any:
    """Return the saved tensor of what `taken` has returned."""
    return value[_PART] if is_taken(value) else value


def unlike(here: Any, saved: Any) -> str | None:
    """Return how the layouts of the script's tensor and of a saved one differ."""
    now, before = layout_of(here), saved[_LAYOUT] if is_taken(saved) else None
    return None if now == before else f"is spread over ranks as {now}, and was as {before}"


def made(part: Any, saved: Any, beside: Any) -> Any:
    """Return a new DTensor of that part on the mesh of `beside`, with the saved layout."""
    _mesh, _names, placements, shape, stride = saved[_LAYOUT]
    torch: Any = sys.modules["torch"]
    spread, size = _placed(placements, beside), torch.Size(shape)
    return class_of(beside).from_local(
        part, beside.device_mesh, spread, run_check=False, shape=size, stride=tuple(stride)
    )


def _placed(placements: Iterable[Any], beside: Any) -> list[Any]:
    """Return PyTorch's placements, whose classes are beside those of that DTensor."""
    classes: Any = sys.modules[type(beside.placements[0]).__module__]
    return [getattr(classes, name)(**dict(zip(_ARGUMENTS[name], given))) for name, *given in placements]


def pending_in(module: Any) -> str | None:
    """Return why no state of a module under FSDP2 can be saved at this moment; None if it can."""
    for inner in module.modules():
        for group in _groups_of(inner):
            if not group.is_sharded:
                return "its parameters are gathered from all ranks"
            if any(_has_gradient(parameter) for parameter in group.fsdp_params):
                return "it has gradients that are not summed over its ranks yet"
    return None


def is_accumulating() -> bool:
    """Return True while a module under FSDP2 has gradients that are not summed yet: a later batch sums them."""
    modules = list(getattr(sys.modules.get(_STATES), "_module_state_mapping", ()))
    groups = [group for module in modules for group in _groups_of(module)]
    return any(_has_gradient(parameter) for group in groups for parameter in group.fsdp_params)


def _groups_of(module: Any) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers together and that this module begins."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _has_gradient(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def accumulates_statically(module: Any, frames: list[FrameType]) -> bool:
    """Return True for DDP with a static graph that skips sums: PyTorch needs a sum in the first batch of a process."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    kind: Any = getattr(parallel, "DistributedDataParallel", ())
    found = [inner for inner in module.modules() if is_a(inner, kind) and getattr(inner, "static_graph", False)]
    skips = any(not _SKIPPING.isdisjoint(frame.f_code.co_names) for frame in frames)
    return any(skips or not inner.require_forward_param_sync for inner in found)

"""The content of each kind of object that has a state: capture it as plain values, compare it, restore it in place.

Tensors are captured without copying; the caller writes them while the training is parked. They are restored into the
tensors that the new script has made, so that all references stay valid. Longer than 400 lines because what each kind
takes, compares and puts back has to agree.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict

from ..storage import raw_copy
from ..storage import tensors as storage_tensors
from . import devices, sharded
from .duck_types import is_a

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_NUMBERS = (int, float, bool)
_COUNTER = "__counter__"
_CALLED = "_opt_called"  # schedules look at it before they warn of steps in the wrong order


# ---- modules --------------------------------------------------------------------------------------------------------


def take_module(module: Any) -> dict[str, Any]:
    """Return parameters and buffers (non-persistent ones included), gradients, flags and the modules' own numbers."""
    tensors = list(_tensors_of(module))
    taken = {
        "class": _class_of(module),
        "tensors": [(name, sharded.taken(tensor), bool(tensor.requires_grad)) for name, tensor in tensors],
        "gradients": {name: found for name, tensor in tensors if (found := _gradient_of(tensor)) is not None},
        "numbers": {name: _numbers_of(inner) for name, inner in module.named_modules()},
        "extra": {name: loose(inner.get_extra_state()) for name, inner in _with_extra(module)},
    }
    scripted = {name: _attributes_of_script(inner) for name, inner in module.named_modules() if _is_script(inner)}
    return {**taken, "scripted": scripted} if scripted else taken


def unfit_module(module: Any, taken: Any) -> list[str]:
    """Return why the module is a different one."""
    if _class_of(module) != taken["class"]:
        return [f"it is a {_class_of(module)} and was a {taken['class']}"]
    here = dict(_tensors_of(module))
    there = {name: tensor for name, tensor, _requires in taken["tensors"]}
    reasons = [f"it has no {name}" for name in there if name not in here]
    reasons += [f"it has {name}, which was not there" for name in here if name not in there]
    for name, tensor in there.items():
        if name in here and not _has_no_shape(here[name]):
            reasons += _unlike(name, here[name], tensor)
    return reasons


def form_of_module(module: Any) -> dict[str, Any]:
    """Return the shape and type of each parameter and buffer; None for one that gets its shape later."""
    return {name: None if _has_no_shape(tensor) else form_of_tensor(tensor) for name, tensor in _tensors_of(module)}


def changes_of_module(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return how its parameters and buffers differ, so that a module with the former ones cannot take the state."""
    changes = [f"{name} is new" for name in now if name not in before]
    changes += [f"{name} is gone" for name in before if name not in now]
    both = [(name, before[name], now[name]) for name in now if name in before]
    return changes + [f"{name} has another shape or type" for name, was, is_ in both if was not in (None, is_)]


def form_of_tensor(tensor: Any) -> tuple[Any, ...]:
    """Return its shape and its type."""
    return tuple(tensor.shape), str(tensor.dtype), sharded.layout_of(tensor)


def _has_no_shape(tensor: Any) -> bool:
    """Return True for a parameter of a lazy module, and for a buffer that is resized once there are values for it."""
    torch: Any = sys.modules["torch"]
    return torch.nn.parameter.is_lazy(tensor) or (not isinstance(tensor, torch.nn.Parameter) and tensor.numel() < 2)


def _take_shape(here: Any, there: Any) -> None:
    """Give a tensor without a shape the one that it had."""
    torch: Any = sys.modules["torch"]
    if torch.nn.parameter.is_lazy(here):
        here.materialize(there.shape, dtype=there.dtype)
    elif here.shape != there.shape:
        here.resize_(there.shape)


def put_module(module: Any, taken: Any) -> None:
    """Copy everything into the module's own tensors."""
    torch: Any = sys.modules["torch"]
    here = dict(_tensors_of(module))
    with torch.no_grad():
        for name, tensor, requires in taken["tensors"]:
            if _has_no_shape(here[name]):
                _take_shape(here[name], tensor)
            _copy(sharded.local(here[name]), sharded.part_of(tensor))
            if here[name].is_leaf and here[name].requires_grad != requires:
                here[name].requires_grad_(requires)
    for name, tensor in here.items():
        if tensor.is_leaf:
            gradient = taken["gradients"].get(name)
            tensor.grad = None if gradient is None else _like(torch, tensor, gradient)
    for name, inner in module.named_modules():
        for attribute, value in taken["numbers"].get(name, {}).items():
            if inner.__dict__.get(attribute, value) != value:
                inner.__dict__[attribute] = value
        for attribute, value in taken.get("scripted", {}).get(name, {}).items():
            setattr(inner, attribute, owned(value))
    for name, inner in _with_extra(module):
        if name in taken["extra"]:
            inner.set_extra_state(owned(taken["extra"][name]))


def tensors_beside(module: Any, taken: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each captured tensor with the module's own."""
    here = dict(_tensors_of(module))
    yield from ((sharded.part_of(tensor), here[name]) for name, tensor, _requires in taken["tensors"] if name in here)


def has_tensors(module: Any) -> bool:
    """Return True if it has parameters or buffers; a loss function has none, for instance."""
    return next(_tensors_of(module), None) is not None


def names_in(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the module's parameters with their names; a shared one has its first name."""
    yield from module.named_parameters()


def _tensors_of(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _numbers_of(module: Any) -> dict[str, Any]:
    """Return `training`, and other counters of a script's class."""
    return {
        name: value for name, value in module.__dict__.items() if type(value) in _NUMBERS and not name.startswith("_")
    }


def _is_script(module: Any) -> bool:
    """Return True for a module that TorchScript has compiled."""
    return "_concrete_type" in module.__dict__


def _attributes_of_script(module: Any) -> dict[str, Any]:
    """Return its attributes, which are TorchScript's own, also `training`."""
    tensors = {name for name, _tensor in _tensors_of(module)}
    names: dict[str, Any] = module._concrete_type.get_attributes()
    return {name: loose(getattr(module, name)) for name in names if name[0] != "_" and name not in tensors}


def _with_extra(module: Any) -> Iterator[tuple[str, Any]]:
    torch: Any = sys.modules["torch"]
    plain = torch.nn.Module.get_extra_state
    for name, inner in module.named_modules():
        if inner.get_extra_state.__func__ is not plain:
            yield name, inner


# ---- optimizers -----------------------------------------------------------------------------------------------------


def take_optimizer(optimizer: Any, references: dict[int, Any]) -> dict[str, Any]:
    """Return its groups, and its state in the order of its parameters, which `references` names."""
    groups: list[Any] = []
    states: list[Any] = []
    own: list[Any] = []
    for group in optimizer.param_groups:
        named: list[Any] = []
        for parameter in group["params"]:
            reference = references.get(id(parameter))
            if reference is None:
                reference = ("own", len(own))
                own.append(take_tensor(parameter))
            named.append((*reference, parameter.device.type))
            state = optimizer.state.get(parameter)
            states.append(None if state is None else loose(dict(state), parameter))
        options = {name: loose(value) for name, value in group.items() if name not in ("params", "param_names")}
        groups.append({"params": named, "options": options})
    called = bool(getattr(optimizer, _CALLED, False))
    taken = {"class": _class_of(optimizer), "groups": groups, "states": states, "own": own, "called": called}
    beside = _states_beside(optimizer)
    return {**taken, "beside": loose(beside)} if beside else taken


def _states_beside(optimizer: Any) -> dict[Any, Any]:
    """Return what a class of the script has in the state under keys other than its parameters."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {key: value for key, value in optimizer.state.items() if id(key) not in known}


def unfit_optimizer(optimizer: Any, taken: Any, references: dict[int, Any]) -> list[str]:
    """Return why the optimizer is a different one."""
    if _class_of(optimizer) != taken["class"]:
        return [f"it is a {_class_of(optimizer)} and was a {taken['class']}"]
    added = taken["groups"][len(optimizer.param_groups) :]
    known = set(references.values())
    if len(optimizer.param_groups) > len(taken["groups"]) or any(
        tuple(was[:2]) not in known for group in added for was in group["params"]
    ):
        return [f"it has {len(optimizer.param_groups)} groups of parameters and had {len(taken['groups'])}"]
    reasons: list[str] = []
    counted = 0
    for index, (group, before) in enumerate(zip(optimizer.param_groups, taken["groups"])):
        if len(group["params"]) != len(before["params"]):
            reasons.append(f"its group {index} has {len(group['params'])} parameters and had {len(before['params'])}")
            continue
        for place, (parameter, was) in enumerate(zip(group["params"], before["params"])):
            reference = references.get(id(parameter))
            if reference is None:
                reference = ("own", counted)
                counted += 1
            if reference != tuple(was[:2]):
                reasons.append(f"parameter {place} of its group {index} is {reference[1]} and was {was[1]}")
            elif reference[0] == "own":
                reasons += _unlike(f"parameter {place} of its group {index}", parameter, taken["own"][was[1]][0])
    return reasons


def form_of_optimizer(optimizer: Any, parameters: dict[int, str]) -> list[list[str | None]]:
    """Return the names of its parameters by group; None for those that no module has."""
    return [[parameters.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def changes_of_optimizer(before: list[list[str | None]], now: list[list[str | None]]) -> list[str]:
    """Return what has changed in its groups, except for groups that were added with parameters of modules."""
    added = now[len(before) :]
    if now[: len(before)] == before and all(name is not None for group in added for name in group):
        return []
    return ["its groups have other parameters"]


def put_optimizer(optimizer: Any, taken: Any, parameter_of: Callable[[Any], Any]) -> list[str]:
    """Restore groups and state, and parameters that no module has. Return what differs on another type of device.

    There the script's choice of how steps are computed stays. Groups that the script added in its loop are added
    again; `parameter_of` returns the parameter of a reference.
    """
    notes: list[str] = []
    for before in taken["groups"][len(optimizer.param_groups) :]:
        params = [parameter_of(was[:2]) for was in before["params"]]
        optimizer.param_groups.append({**optimizer.defaults, "params": params})
    if taken["called"]:
        setattr(optimizer, _CALLED, True)
    states = iter(taken["states"])
    for group, before in zip(optimizer.param_groups, taken["groups"]):
        kinds = [(device, parameter.device.type) for (*_, device), parameter in zip(before["params"], group["params"])]
        moved = next((pair for pair in kinds if pair[0] != pair[1]), None)
        notes += _set_options(group, before["options"], moved)
        for parameter, (where, key, device) in zip(group["params"], before["params"]):
            if where == "own":
                tensor, gradient, requires = taken["own"][key]
                put_tensor(parameter, tensor, gradient, requires=requires)
            state = next(states)
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = _moved(state, device, parameter, group)
    for key in _states_beside(optimizer):
        del optimizer.state[key]
    optimizer.state.update(owned(taken.get("beside", {})))
    return list(dict.fromkeys(notes))


def _set_options(group: dict[str, Any], options: dict[str, Any], moved: tuple[str, str] | None) -> Iterator[str]:
    """`moved` are the kinds of devices that its parameters were on and are on, where these differ."""
    torch: Any = sys.modules["torch"]
    for name, value in options.items():
        if moved is not None and name in devices.IMPLEMENTATION:
            if group.get(name) != value:
                yield f"{name} was {value} on {moved[0]} and is {group.get(name)} on {moved[1]}"
        elif isinstance(group.get(name), torch.Tensor) and is_a(value, torch.Tensor):
            _copy(group[name], value)
        else:
            group[name] = _owned(value)


def _moved(state: Any, was_on: str, parameter: Any, group: dict[str, Any], name: Any = None) -> Any:
    """Return the optimizer's state of a parameter, moved from its former type of device to the present one."""
    torch: Any = sys.modules["torch"]
    if is_a(state, torch.Tensor):
        former = storage_tensors.was_on(state)
        return _made(state, devices.device_of_state(name, former, group, was_on, parameter.device))
    if sharded.is_taken(state):
        return sharded.made(_moved(sharded.part_of(state), was_on, parameter, group, name), state, parameter)
    if is_a(state, dict):
        if set(state) == {_COUNTER}:
            return _counter(state[_COUNTER])
        return type(state)((key, _moved(value, was_on, parameter, group, key)) for key, value in state.items())
    if is_a(state, list, tuple):
        return type(state)(_moved(value, was_on, parameter, group) for value in state)
    return state


# ---- tensors and the rest -------------------------------------------------------------------------------------------


def take_tensor(tensor: Any) -> tuple[Any, Any, bool]:
    """Return a tensor that is in no module, and its gradient."""
    return sharded.taken(tensor), _gradient_of(tensor), bool(tensor.requires_grad)


def _gradient_of(tensor: Any) -> Any:
    return sharded.taken(tensor.grad, tensor) if tensor.is_leaf and tensor.grad is not None else None


def put_tensor(tensor: Any, saved: Any, gradient: Any, *, requires: bool) -> None:
    """Copy into a tensor that is in no module."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        _copy(sharded.local(tensor), sharded.part_of(saved))
    if tensor.is_leaf:
        if tensor.requires_grad != requires:
            tensor.requires_grad_(requires)
        tensor.grad = None if gradient is None else _like(torch, tensor, gradient)


def unfit_tensor(tensor: Any, saved: Any) -> list[str]:
    """Return why the tensor is a different one."""
    return _unlike("it", tensor, saved)


def loose(value: Any, parameter: Any = None) -> Any:
    """Return the value in types that a state file has. Other values stay, and the encoder refuses them.

    `parameter`: the value is an optimizer's state of that parameter, perhaps a DTensor on the same device mesh.
    """
    if is_a(value, Counter):
        return {_COUNTER: dict(value)}
    if is_a(value, dict):
        kind: Any = OrderedDict if is_a(value, OrderedDict) else dict
        return kind((key, loose(found, parameter)) for key, found in value.items())
    if type(value) in (list, tuple):
        return type(value)(loose(found, parameter) for found in value)
    if parameter is not None and sharded.is_spread(value):
        return sharded.taken(value, parameter)
    return value.detach() if hasattr(value, "detach") and hasattr(value, "untyped_storage") else value


def owned(value: Any) -> Any:
    """Return a copy of a value from a state file, in whose memory its tensors are. Raises HegmError."""
    made = _owned(value)
    make_copies()
    return made


def _owned(value: Any) -> Any:
    if hasattr(value, "untyped_storage"):
        return _made(value, devices.device_like(storage_tensors.was_on(value)))
    if hasattr(value, "tobytes") and hasattr(value, "copy"):
        return value.copy()
    if is_a(value, dict):
        if set(value) == {_COUNTER}:
            return _counter(_owned(value[_COUNTER]))
        return type(value)((key, _owned(found)) for key, found in value.items())
    if type(value) in (list, tuple):
        return type(value)(_owned(found) for found in value)
    return value


def _counter(counts: dict[Any, int]) -> Counter[Any]:
    return Counter(counts)


def _like(torch: Any, tensor: Any, gradient: Any) -> Any:
    if sharded.is_taken(gradient):
        return sharded.made(_made(sharded.part_of(gradient), tensor.device), gradient, tensor)
    return _copy(torch.empty_like(tensor, dtype=gradient.dtype, requires_grad=False), gradient)


# ---- copies ---------------------------------------------------------------------------------------------------------

_SMALL_BYTES = 1 << 16
_waiting: list[tuple[Any, Any]] = []


def _copy(target: Any, saved: Any) -> Any:
    """Have the tensor filled by `make_copies`."""
    _waiting.append((saved, target))
    return target


def _made(saved: Any, device: Any) -> Any:
    """Return a new tensor on that device. `make_copies` fills a large one."""
    torch: Any = sys.modules["torch"]
    if saved.numel() * saved.element_size() < _SMALL_BYTES:
        return saved.detach().to(device, copy=True).requires_grad_(saved.requires_grad)
    made = torch.empty_strided(saved.shape, saved.stride(), dtype=saved.dtype, device=device)
    return _copy(made, saved).requires_grad_(saved.requires_grad)


def make_copies() -> None:
    """Fill all tensors that wait for it: at once, which is quicker than one by one. Raises HegmError."""
    waiting = _waiting[:]
    _waiting.clear()
    raw_copy.fill(waiting)


def _unlike(name: str, here: Any, there: Any) -> list[str]:
    if (differs := sharded.unlike(here, there)) is not None:
        return [f"{name} {differs}"]
    here, there = sharded.local(here), sharded.part_of(there)
    if tuple(here.shape) != tuple(there.shape):
        return [f"{name} has the shape {tuple(here.shape)} and had {tuple(there.shape)}"]
    if here.dtype != there.dtype:
        return [f"{name} is of {here.dtype} and was of {there.dtype}"]
    return []


def _class_of(thing: Any) -> str:
    return type(thing).__qualname__

"""The contribution of each kind of object to a state: read, compared and set.

Chooses between `agent/state/values/contents` and `agent/state/values/rng`; other objects use their `state_dict`.
"""

from __future__ import annotations

from ..values import contents, rng
from .discovery import GENERATOR, MODULE, OPTIMIZER, SCALER, TENSOR, FoundObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def taken(found: FoundObject, references: dict[int, Any]) -> Any:
    if found.kind == MODULE:
        return contents.take_module(found.thing)
    if found.kind == OPTIMIZER:
        return contents.take_optimizer(found.thing, references)
    if found.kind == GENERATOR:
        return rng.read(found.thing)
    if found.kind == TENSOR:
        return contents.take_tensor(found.thing)
    return contents.loose(found.thing.state_dict())


def form_of(found: FoundObject, parameters: dict[int, str]) -> Any:
    """Return what has to be the same in a restarted script; None if nothing has to. `parameters` names them by address.

    It holds no tensor.
    """
    if found.kind == MODULE:
        return contents.form_of_module(found.thing)
    if found.kind == OPTIMIZER:
        return contents.form_of_optimizer(found.thing, parameters)
    return contents.form_of_tensor(found.thing) if found.kind == TENSOR else None


def changes_between(kind: str, before: Any, now: Any) -> list[str]:
    """Return what has changed between two forms of an object so that its state cannot be restored."""
    if kind == MODULE:
        return contents.changes_of_module(before, now)
    if kind == OPTIMIZER:
        return contents.changes_of_optimizer(before, now)
    return [] if before == now else ["its shape or type"]


def unfit(found: FoundObject, content: Any, references: dict[int, Any]) -> list[str]:
    if found.kind == MODULE:
        return contents.unfit_module(found.thing, content)
    if found.kind == OPTIMIZER:
        return contents.unfit_optimizer(found.thing, content, references)
    if found.kind == TENSOR:
        return contents.unfit_tensor(found.thing, content[0])
    return []


def put(found: FoundObject, content: Any, parameter_of: Callable[[Any], Any]) -> list[str]:
    """Restore it. Return what differs here. `parameter_of` returns a module's parameter by its reference."""
    if found.kind == OPTIMIZER:
        return contents.put_optimizer(found.thing, content, parameter_of)
    if found.kind == GENERATOR and not rng.fits(found.thing, content):
        return ["its numbers are those of a new generator: it was on another kind of device"]
    if found.kind == SCALER and not content:  # a scaler that was not in use, such as on the CPU
        return [] if not found.thing.is_enabled() else ["it starts at its initial scale: it scaled nothing before"]
    if found.kind == MODULE:
        contents.put_module(found.thing, content)
    elif found.kind == GENERATOR:
        rng.set_to(found.thing, content)
    elif found.kind == TENSOR:
        tensor, gradient, requires = content
        contents.put_tensor(found.thing, tensor, gradient, requires=requires)
    else:
        found.thing.load_state_dict(contents.owned(content))
    return []


def references_of(objects: dict[int, FoundObject]) -> dict[int, tuple[int, str]]:
    """Return every parameter of the modules by address: its holding, and its name there."""
    found: dict[int, tuple[int, str]] = {}
    for index, holding in objects.items():
        if holding.kind == MODULE:
            for name, parameter in contents.names_in(holding.thing):
                found.setdefault(id(parameter), (index, name))
    return found


def parameter_names(objects: list[FoundObject]) -> dict[int, str]:
    """Return the name of every parameter in its module, by address."""
    found: dict[int, str] = {}
    for holding in objects:
        if holding.kind == MODULE:
            for name, parameter in contents.names_in(holding.thing):
                found.setdefault(id(parameter), name)
    return found

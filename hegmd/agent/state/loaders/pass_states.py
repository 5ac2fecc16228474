"""The random states and the samplers' own values at one moment of a pass: saved, and set again.

A pass depends on these when it starts and when its sampler is first asked; `passes` records both.
"""

from __future__ import annotations

from ..values import rng
from ..values.refusals import IncompatibleState
from . import sampler_inputs
from .loaders import samplers_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def states_of(gathered: list[Any]) -> dict[str, Any]:
    own = [rng.read(found) for found in gathered]
    return {"shared": rng.read_shared(with_gpus=False), "own": own}


def set_states(gathered: list[Any], states: Any) -> None:
    rng.set_shared(states["shared"])
    if len(states["own"]) != len(gathered):
        raise IncompatibleState(
            [f"a loader had {len(states['own'])} random generators of its own and has {len(gathered)}"]
        )
    for found, state in zip(gathered, states["own"]):
        rng.set_to(found, state)


def beginning_of(gathered: list[Any], owner: Any, path: Any, *, of_sampler: bool = False) -> dict[str, Any]:
    """Return the random states, and the plain attributes of the samplers, such as a count of epochs."""
    samplers = samplers_of(owner if of_sampler else owner._index_sampler)
    attributes = [
        {name: value for name, value in getattr(found, "__dict__", {}).items() if type(value) in (int, float, bool)}
        for found in samplers
    ]
    changed = [sampler_inputs.changed_of(found, path, index) for index, found in enumerate(samplers)]
    return {**states_of(gathered), "attributes": attributes, "orders": changed}


def set_beginning(gathered: list[Any], loader: Any, beginning: Any) -> None:
    set_states(gathered, beginning)
    set_attributes(loader, beginning)


def set_attributes(loader: Any, beginning: Any) -> None:
    set_orders(loader, beginning)
    for sampler, attributes in zip(samplers_of(loader._index_sampler), beginning["attributes"]):
        for name, value in attributes.items():
            if getattr(sampler, "__dict__", {}).get(name, value) != value:
                setattr(sampler, name, value)


def set_orders(loader: Any, beginning: Any) -> None:
    for sampler, changed in zip(samplers_of(loader._index_sampler), beginning["orders"]):
        sampler_inputs.set_back(sampler, changed)

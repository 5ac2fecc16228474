"""Restores a state in the restarted script, which is at its place.

First everything is compared, so that a state that does not fit changes nothing; then all is set in the order of
dependencies. Variables that start again are reported on stderr, because stdout belongs to the script.
"""

from __future__ import annotations

import os

from .capture import FORM
from .code.position import ThreadPosition
from .frameworks import accelerate_hf
from .script import kind_table, restore_variables, variables
from .script.discovery import (
    GENERATOR,
    MODULE,
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    STATEFUL,
    TENSOR,
    FoundObject,
    ScriptSearch,
    is_open,
)
from .script.references import matched, part_of
from .values import contents, devices, rng, sharded
from .values.refusals import IncompatibleState
from .values.script_api import KEY, registrations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any


def put_back(state: dict[str, Any], frame: FrameType | None) -> None:
    """Set everything in the script, which is at its place; `frame` is the training thread's. Raises DoesNotFit."""
    if state["form"] != FORM:
        raise IncompatibleState([f"the state has form {state['form']}, and this release reads form {FORM}"])
    frames = ThreadPosition(frame).frames
    pairs, reasons = _compared(state, frames)
    reasons += registrations.misfits(state[KEY], _optimizers_in(pairs))
    reasons += accelerate_hf.resuming.misfits(state[accelerate_hf.KEY])
    reasons += restore_variables.misfits(state[variables.KEY], frames)
    if reasons:
        raise IncompatibleState(reasons)
    devices.learn_places(_placed_tensors_in(pairs))

    def parameter_of(reference: Any) -> Any:
        return part_of(pairs[reference[0]][1].thing, f"named_parameters:{reference[1]}")

    stateful_ones = [(saved, found) for saved, found in pairs.values() if found.kind == STATEFUL]
    for saved, found in stateful_ones:
        kind_table.put(found, saved["content"], parameter_of)
    if any(is_open(found) for _saved, found in stateful_ones):
        pairs, reasons = _compared(state, frames)  # their content may be another object now
        if reasons:
            raise IncompatibleState(reasons)
    lines: list[str] = []
    for kind in (MODULE, OPTIMIZER, SCHEDULER, SCALER, TENSOR, GENERATOR):
        for saved, found in pairs.values():
            if found.kind == kind:
                lines += [
                    f"{saved['names'][0]}: {what}" for what in kind_table.put(found, saved["content"], parameter_of)
                ]
    contents.make_copies()

    def held(reference: Any) -> Any:
        found = pairs.get(reference[1])
        return None if found is None else part_of(found[1].thing, reference[2])

    from_cpu = devices.left_cpu(_tensors_in(pairs))
    missing = restore_variables.put_back(state[variables.KEY], frames, held, from_cpu=from_cpu)
    _print_reset_variables([*state[variables.KEY]["anew"], *missing])
    _print_unsearched(state[variables.KEY]["unseen"])
    _print_device_differences(lines)
    registrations.put_back(state[KEY], _optimizers_in(pairs))
    accelerate_hf.resuming.put_back(state[accelerate_hf.KEY])
    rng.set_shared(state["shared"])


def _compared(state: dict[str, Any], frames: list[FrameType]) -> tuple[dict[int, tuple[Any, FoundObject]], list[str]]:
    """Return what was saved, each with the script's object here, and why they do not fit."""
    pairs, reasons = _matched(state["holdings"], ScriptSearch(frames).list)
    references = kind_table.references_of({index: found for index, (_saved, found) in pairs.items()})
    for saved, found in pairs.values():
        reasons += [f"{saved['names'][0]}: {why}" for why in kind_table.unfit(found, saved["content"], references)]
    return pairs, reasons


def _optimizers_in(pairs: dict[int, tuple[Any, FoundObject]]) -> list[Any]:
    return [found.thing for _saved, found in pairs.values() if found.kind == OPTIMIZER]


def _print_reset_variables(names: list[str]) -> None:
    """Write to stderr which of the script's variables start over; standard output belongs to the script."""
    if names:
        text = f"hegm: starts over after the restart: {'; '.join(names)}. hegm.keep keeps such things.\n"
        os.write(2, text.encode(errors="replace"))


def _print_unsearched(names: list[str]) -> None:
    """Write to stderr what may start over because it was not searched."""
    if names:
        text = f"hegm: not searched, and so starts over after the restart: {'; '.join(names)}. hegm.keep keeps it.\n"
        os.write(2, text.encode(errors="replace"))


def _print_device_differences(lines: list[str]) -> None:
    """Write to stderr what differs on another type of device."""
    if lines:
        os.write(2, f"hegm: after the restart: {'; '.join(lines)}.\n".encode(errors="replace"))


def _tensors_in(pairs: dict[int, tuple[Any, FoundObject]]) -> Iterator[tuple[Any, Any]]:
    """Yield each saved tensor of all modules, with the one here."""
    for saved, found in pairs.values():
        if found.kind == MODULE:
            yield from contents.tensors_beside(found.thing, saved["content"])


def _placed_tensors_in(pairs: dict[int, tuple[Any, FoundObject]]) -> Iterator[tuple[Any, Any]]:
    """Yield the same of all modules, and of the tensors that are in none."""
    yield from _tensors_in(pairs)
    for saved, found in pairs.values():
        if found.kind == TENSOR:
            yield sharded.part_of(saved["content"][0]), found.thing


def _matched(saved: list[Any], here: list[FoundObject]) -> tuple[dict[int, tuple[Any, FoundObject]], list[str]]:
    """Return each saved object with the one here that has its names, preferably one of the same class."""
    names = [entry["names"] for entry in saved], [found.names for found in here]

    def is_alike(mine: int, yours: int) -> bool:
        return bool(
            saved[mine]["kind"] == here[yours].kind and saved[mine]["class"] == type(here[yours].thing).__qualname__
        )

    found = matched(*names, is_alike)
    others = matched(
        *names,
        lambda mine, yours: (
            mine not in found and yours not in found.values() and saved[mine]["kind"] == here[yours].kind
        ),
    )
    numbers = {**others, **found}
    pairs = {index: (saved[index], here[numbers[index]]) for index in sorted(numbers)}
    reasons = [
        f"{entry['names'][0]}: there is no such {entry['kind']} yet where the training continues"
        for index, entry in enumerate(saved)
        if index not in numbers
    ]
    return pairs, reasons

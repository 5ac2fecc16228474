"""Records all that a training computes, and its boundaries, by PyTorch's global hooks outside of its script.

Every input of every module (the batches among them), every rate, the parameters and the optimizer's state after each
step, and at the end everything that the modules hold and the schedules say: a line each, bit for bit, in a file that
several starts of a script append to. The script knows nothing of it, and no number is drawn for it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook

#: Kinds of boundaries, by what the training is about to do.
FIRST, LAST, BETWEEN, ACCUMULATING, WITHIN = "first batch", "last batch", "between epochs", "accumulating", "within"
EVALUATING, ELSEWHERE = "evaluating", "elsewhere"


class Recorder:
    """Writes to that descriptor while the script runs. It keeps each recorded object until the end is written."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._made: dict[int, torch.nn.Module] = {}
        self._has_stepped = False
        modules.register_module_forward_pre_hook(self._note_inputs)
        modules.register_module_parameter_registration_hook(self._note_made)
        modules.register_module_buffer_registration_hook(self._note_made)
        register_optimizer_step_post_hook(self._note_step)

    def kind_of_boundary(self, iterator: Any) -> str:
        """The position of the training that asks this iterator of a loader; None for one that asks none."""
        has_stepped, self._has_stepped = self._has_stepped, False
        if not torch.is_grad_enabled():
            return EVALUATING
        if iterator is None:
            return ELSEWHERE
        given, whole = iterator._num_yielded, _length_of(iterator)
        if given == whole:
            return BETWEEN
        if given == 0:
            return FIRST
        if given + 1 == whole:
            return LAST
        return WITHIN if has_stepped else ACCUMULATING

    def finish(self) -> None:
        """The script has ended: write the final values of its modules and schedules, in a fixed order."""
        schedule: Any = torch.optim.lr_scheduler.LRScheduler
        held = [found for found in gc.get_objects() if issubclass(type(found), (torch.nn.Module, schedule))]
        everything = {**self._made, **{id(found): found for found in held if isinstance(found, torch.nn.Module)}}
        schedules = [found for found in held if isinstance(found, schedule)]
        lines = [f"end {type(found).__name__} {digest(_own_of(found)):08x}" for found in everything.values()]
        lines += [f"end {type(found).__name__} {digest(found.state_dict()):08x}" for found in schedules]
        for line in sorted(lines):
            self._write(line)

    def _write(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())

    def _note_made(self, module: torch.nn.Module, _name: str, _part: Any) -> None:
        self._made[id(module)] = module

    def _note_inputs(self, module: torch.nn.Module, inputs: Any) -> None:
        self._write(f"input {type(module).__name__} {digest(inputs):08x}")

    def _note_step(self, optimizer: Any, _args: Any, _named: Any) -> None:
        self._has_stepped = True
        rates = [float(group["lr"]).hex() for group in optimizer.param_groups]
        self._write(f"step {type(optimizer).__name__} {' '.join(rates)} {digest(list(_parts_of(optimizer))):08x}")


def digest(value: Any, so_far: int = 0) -> int:
    """A sum of all the numbers and texts in it, of tensors the very bytes."""
    if isinstance(value, torch.Tensor):
        so_far = crc32(repr((value.dtype, tuple(value.shape))).encode(), so_far)
        return crc32(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, so_far)
    if isinstance(value, dict):
        for key, found in value.items():
            so_far = digest(found, crc32(repr(key).encode(), so_far))
        return so_far
    if isinstance(value, (list, tuple)):
        for found in value:
            so_far = digest(found, so_far)
        return so_far
    return crc32(repr(value).encode(), so_far) if isinstance(value, (bool, int, float, str)) else so_far


def at_kind(
    recorder: Recorder, fd: int, position: Callable[[], Any], fits: Callable[[], bool], kind: str | None
) -> Callable[[], bool]:
    """The callback of a gate at each boundary, whose kind is written to that descriptor: True if it parks there."""

    def will_do() -> bool:
        found = recorder.kind_of_boundary(position())
        os.write(fd, f"{found}\n".encode())
        return found == kind and fits()

    return will_do


def _length_of(iterator: Any) -> int | None:
    try:
        return len(iterator)
    except TypeError:  # a dataset without a length
        return None


def _own_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    return dict(sorted(own.items()))


def _parts_of(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            yield dict(sorted(optimizer.state.get(parameter, {}).items()))

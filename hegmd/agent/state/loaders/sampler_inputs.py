"""A script's changes to a sampler's inputs, such as weights that follow the losses or lists of indices, and of the
data that workers get at the start of a pass.

A pass is made again before anything else of a state is restored, and its order depends on the sampler's inputs at the
start of the pass. They are recorded if they differ from the first pass.
"""

from __future__ import annotations

import sys

from ..code.drift import print_of
from ..code.encoding import Decoding, NotEncodable, ValueEncoder
from ..values.duck_types import is_a

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PASSED: Any = (int, float, bool, str, type(None))
_CONTAINERS: Any = (list, tuple, dict, set)
_MAX_BYTES = 256 << 20
_first: dict[Any, dict[str, Any]] = {}


def changed_of(sampler: Any, path: Any, index: int, *, is_all: bool = False) -> list[tuple[str, Any]]:
    """Return copies of its tensors, arrays and containers that have changed since the first pass there.

    With `is_all` its plain values too. The sampler may be another object than it was then, so values are compared.
    """
    own: dict[str, Any] = getattr(sampler, "__dict__", {})
    values = {name: value for name, value in own.items() if _is_looked_at(value) or (is_all and is_a(value, *_PASSED))}
    first = _first.get((path, index))
    if first is None:
        _first[path, index] = {name: print_of(_numbers_of(value)) for name, value in values.items()}
        return []
    changed = [(name, value) for name, value in values.items() if first.get(name) != print_of(_numbers_of(value))]
    return [(name, _form_of(value)) for name, value in changed]


def not_kept(changed: list[list[tuple[str, Any]]]) -> list[str]:
    """Return the names of those without a form."""
    return [name for found in changed for name, form in found if form is None]


def set_back(sampler: Any, changed: list[Any]) -> None:
    """Have the sampler hold that again."""
    settling = Decoding(lambda _reference, _settling: None)
    for name, form in changed:
        setattr(sampler, name, settling.settle(form, getattr(sampler, name, None), name))
    settling.fill()


def _is_looked_at(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kinds = [getattr(torch, "Tensor", None), getattr(numpy, "ndarray", None)]
    return is_a(value, *_CONTAINERS, *[kind for kind in kinds if kind is not None])


def _numbers_of(value: Any) -> Any:
    """Return a CPU tensor as an array, so that elements can be compared."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not is_a(value, torch.Tensor) or value.device.type != "cpu" or value.is_sparse:
        return value
    return value.detach().numpy() if value.dtype is not torch.bfloat16 else value.detach().float().numpy()


def _is_large(value: Any) -> bool:
    parts: list[Any] = list(value) if is_a(value, list, tuple) else [value]
    return sum(getattr(found, "nbytes", 0) for found in parts) > _MAX_BYTES


def _form_of(value: Any) -> Any:
    copy: Any = sys.modules["copy"]  # PyTorch has imported it
    try:
        if _is_large(value):
            return None
        return ValueEncoder(lambda _value, _forms: None, {}).of(copy.deepcopy(value))
    except (NotEncodable, RuntimeError, TypeError):
        return None

"""The parts of a loader (samplers, datasets, generators), and whether another loader is the same.

Nothing here asks a loader for a batch, draws a number or changes it.
"""

from __future__ import annotations

from ..frameworks import accelerate_hf
from ..values import rng
from . import sampler_inputs, sampler_rng

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SAMPLERS_DEEP = 6
#: The lengths of the datasets of first passes, by the place of their loaders.
_first_rows: dict[Any, int | None] = {}


def signature_of(loader: Any) -> dict[str, Any]:
    """Return what two equal loaders have in common."""
    sampler = loader._index_sampler
    return {
        "loader": type(loader).__name__,
        "sampler": [type(found).__name__ for found in samplers_of(sampler)],
        "batch_size": loader.batch_size if isinstance(loader.batch_size, int) else None,
        "batches": _length_of(sampler),
        "rows": _length_of(loader.dataset),
        "workers": loader.num_workers,
    }


def generators_of(loader: Any) -> list[Any]:
    """Return the generator objects of a loader and its samplers."""
    samplers = samplers_of(loader._index_sampler)
    own = list(rng.held_by([loader]))
    reseeding = [found for found in samplers if accelerate_hf.reseeds(found)]
    within, _is_whole = sampler_rng.held_within(samplers, [*own, *reseeding, *datasets_of(loader.dataset)])
    return own + within


def samplers_of(sampler: Any) -> list[Any]:
    found: list[Any] = []
    while sampler is not None and len(found) < _SAMPLERS_DEEP and not isinstance(sampler, (list, tuple, range)):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def data_of(loader: Any, path: Any) -> list[Any]:
    """Return what has changed in its datasets since the first pass there; workers get their current values.

    Without workers only if its length has changed too: the sampler's order depends on that. The rest of a script's
    object is restored with its variables.
    """
    is_first = path not in _first_rows
    if not (has_other_length(loader, path) or loader.num_workers or is_first):
        return []
    found = enumerate(datasets_of(loader.dataset))
    return [sampler_inputs.changed_of(dataset, ("data", path), index, is_all=True) for index, dataset in found]


def has_other_length(loader: Any, path: Any) -> bool:
    """Return True if its dataset has not the length that it had in the first pass there."""
    rows = _length_of(loader.dataset)
    return _first_rows.setdefault(path, rows) != rows


def datasets_of(dataset: Any) -> list[Any]:
    found: list[Any] = []
    while dataset is not None and len(found) < _SAMPLERS_DEEP:
        found.append(dataset)
        dataset = getattr(dataset, "__dict__", {}).get("dataset")
    return found


def _length_of(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def kept_iterator(loader: Any) -> Any:
    return loader._iterator if loader.num_workers > 0 and loader.persistent_workers else None


def unlike(taken: Any, signature: dict[str, Any]) -> str:
    unlike = [
        f"{name} was {dict(taken['signature']).get(name)!r} and is {value!r}"
        for name, value in signature.items()
        if dict(taken["signature"]).get(name) != value
    ]
    return f"the loader that is read at {taken['path'][-1]} is another one: {', '.join(unlike)}"

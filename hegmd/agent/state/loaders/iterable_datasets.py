"""Datasets without indices: their position, if they report it, or else a replay from the start.

A dataset, or its iterator, may have `state_dict` and `load_state_dict`, as for PyTorch's StatefulDataLoader; then it is
at its position at once. If the script declares that it yields the same each time, the items that were used are
requested again and dropped. Any other dataset prevents a restart.
"""

from __future__ import annotations

import os

from ..values import contents
from ..values.refusals import DoesNotFit, Refusal
from ..values.script_api import replayed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

REPLAY = "HEGM_REPLAY"
_ITERABLE = 1  # torch.utils.data.dataloader._DatasetKind
_HINT = (
    "give the dataset state_dict and load_state_dict; or, if it gives the same each time, take it from "
    "hegm.resumable(loader, replay=True), or set HEGM_REPLAY=1"
)


def stream_of(loader: Any) -> Stream | None:
    """What is known of the loader's dataset; None where it has indices."""
    return Stream(loader) if loader._dataset_kind == _ITERABLE else None


class Stream:
    """A dataset that is read one item after the other."""

    def __init__(self, loader: Any) -> None:
        self._dataset = loader.dataset
        self._replays = replayed(loader) or os.environ.get(REPLAY, "") not in ("", "0")
        self._workers = int(loader.num_workers)
        self._says = False

    def refusals(self, given: int, iterator: Any) -> list[Refusal]:
        """Why it could not be brought to where it is."""
        self._says = not self._workers and (_says_where(self._dataset) or _says_where(_reader_of(iterator)))
        if given and not self._replays:
            return [Refusal("a batch of an outer loop over an iterable dataset is in use", _HINT)]
        if self._says or self._replays:
            return []
        name = type(self._dataset).__qualname__
        if self._workers:
            return [Refusal(f"workers read {name}, an iterable dataset, and cannot say where they are in it", _HINT)]
        return [Refusal(f"a loader reads {name}, an iterable dataset that cannot say where it is", _HINT)]

    def taken(self, iterator: Any) -> dict[str, Any]:
        """Where it is, as far as it says so."""
        if self._replays or not self._says:
            return {"replays": self._replays}
        reader = _reader_of(iterator)
        owner, place = ("reader", reader) if _says_where(reader) else ("dataset", self._dataset)
        return {"replays": False, "of": owner, "state": contents.loose(place.state_dict())}

    def prepare(self, taken: Any) -> None:
        """Before the loader makes its iterator: a dataset that is asked itself is told now."""
        if taken["replays"] != self._replays:
            raise DoesNotFit(["a loader that could be replayed cannot be now, or the other way round"])
        if taken.get("of") == "dataset":
            self._dataset.load_state_dict(contents.owned(taken["state"]))

    def go_on(self, iterator: Any, taken: Any, delivered: int) -> None:
        """After it has: be where so many batches have been given."""
        if taken["replays"]:
            for index in range(delivered):
                try:
                    iterator._next_data()
                except StopIteration:
                    raise DoesNotFit(
                        [f"an iterable dataset had given {delivered} batches, and ends after {index}"]
                    ) from None
        elif taken["of"] == "reader":
            _reader_of(iterator).load_state_dict(contents.owned(taken["state"]))
        iterator._num_yielded = delivered


def _reader_of(iterator: Any) -> Any:
    return iterator._dataset_fetcher.dataset_iter


def _says_where(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))

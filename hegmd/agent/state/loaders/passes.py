"""One pass over a loader: the values recorded at its start, and those saved of it.

A pass is a function of the random states at its start and of its sampler. So the states are recorded when it starts,
and again when its sampler is first asked. The restarted script sets them at the same two moments (`rebuild`).

A dataset without indices, or its iterator, restores its position with `state_dict` and `load_state_dict`, as for
PyTorch's StatefulDataLoader. If the script declares that the dataset yields the same each time, the used items are
requested again and dropped. Any other dataset prevents a restart.
"""

from __future__ import annotations

import os
import weakref
from _thread import get_ident

from ..code import loop_position
from ..code.position import step_text
from ..values import contents, rng
from ..values.refusals import IncompatibleState, Refusal
from ..values.script_api import replayed
from . import dataset_identity, sampler_inputs, sampler_rng, stateful_loader
from .loaders import data_of, generators_of, has_other_length, kept_iterator, signature_of
from .pass_states import beginning_of, states_of
from .worker_rng import Seeds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


REPLAY = "HEGM_REPLAY"
_ITERABLE = 1  # torch.utils.data.dataloader._DatasetKind
_HINT = (
    "give the dataset state_dict and load_state_dict; or, if it gives the same each time, take it from "
    "hegm.resumable(loader, replay=True), or set HEGM_REPLAY=1"
)


def stream_of(loader: Any) -> Stream | None:
    """Return the loader's iterable dataset; None if it has indices."""
    return Stream(loader) if loader._dataset_kind == _ITERABLE else None


class Stream:
    """A dataset that is read one item after the other."""

    def __init__(self, loader: Any) -> None:
        self._dataset = loader.dataset
        self._replays = replayed(loader) or os.environ.get(REPLAY, "") not in ("", "0")
        self._workers = int(loader.num_workers)
        self._says = False

    def refusals(self, given: int, iterator: Any) -> list[Refusal]:
        """Return why its position could not be restored."""
        self._says = not self._workers and (_says_where(self._dataset) or _says_where(_reader_of(iterator)))
        if given and not self._replays:
            return [Refusal("a batch of an outer loop over an iterable dataset is in use", _HINT)]
        if self._says or self._replays:
            return []
        name = type(self._dataset).__qualname__
        if self._workers:
            return [Refusal(f"workers read {name}, an iterable dataset, and cannot say where they are in it", _HINT)]
        return [Refusal(f"a loader reads {name}, an iterable dataset that does not report its position", _HINT)]

    def taken(self, iterator: Any) -> dict[str, Any]:
        """Return its position, if it reports one."""
        if self._replays or not self._says:
            return {"replays": self._replays}
        reader = _reader_of(iterator)
        owner, place = ("reader", reader) if _says_where(reader) else ("dataset", self._dataset)
        return {"replays": False, "of": owner, "state": contents.loose(place.state_dict())}

    def prepare(self, taken: Any) -> None:
        """Set the position of a dataset that reports it, before the loader creates its iterator."""
        if taken["replays"] != self._replays:
            raise IncompatibleState(["a loader that could be replayed cannot be now, or the reverse"])
        if taken.get("of") == "dataset":
            self._dataset.load_state_dict(contents.owned(taken["state"]))

    def go_on(self, iterator: Any, taken: Any, delivered: int) -> None:
        """Set the position after that many batches, once the loader has its iterator."""
        if taken["replays"]:
            for index in range(delivered):
                try:
                    iterator._next_data()
                except StopIteration:
                    raise IncompatibleState(
                        [f"an iterable dataset had given {delivered} batches, and ends after {index}"]
                    ) from None
        elif taken["of"] == "reader":
            _reader_of(iterator).load_state_dict(contents.owned(taken["state"]))
        iterator._num_yielded = delivered


def _reader_of(iterator: Any) -> Any:
    return iterator._dataset_fetcher.dataset_iter


def _says_where(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


class Iteration:
    """A pass over a loader, identified by the place in the script where it started."""

    __slots__ = (
        "_before",
        "_creation",
        "_data",
        "_first",
        "_first_sums",
        "_is_of_unknown_length",
        "_is_remade",
        "_own",
        "_seeds",
        "_stream",
        "_sums",
        "base",
        "gathered",
        "given_states",
        "ident",
        "iterator",
        "number",
        "path",
        "requests",
        "sent",
        "signature",
    )

    def __init__(self, number: int, path: Any, loader: Any) -> None:
        self.number = number
        self.path = path
        self.ident = get_ident()
        self.signature = signature_of(loader)
        self.iterator: Any = None
        self.requests = loop_position.FirstBatchRequests()
        self.base = 0  # the first batch that this process's workers made of it
        self.sent: list[int] = []  # how many batches each worker has made in earlier passes
        self.given_states: dict[int, Any] = {}
        self.gathered: list[Any] = generators_of(loader)
        self._before = beginning_of(self.gathered, loader, path)
        self._creation: Any = None
        self._first: Any = None
        self._seeds: Seeds | None = None
        self._own = stateful_loader.OwnLoaderState(loader) if stateful_loader.restores_by_own_state(loader) else None
        self._stream = None if self._own is not None else stream_of(loader)
        self._data = data_of(loader, path)
        self._is_of_unknown_length = has_other_length(loader, path) and not any(self._data)
        before = _read_at.get(path)
        self._sums = dataset_identity.sums_of(loader.dataset) if self._stream is None else {}
        self._first_sums = _sums_at.setdefault(path, self._sums)
        self._is_remade = before is not None and not before.are_of(loader.dataset)
        _read_at[path] = dataset_identity.DatasetSources(loader.dataset)

    # ---- as it begins ------------------------------------------------------------------------------------------------

    def begin(self, loader: Any, make: Callable[[Any], Any]) -> Any:
        """Let the loader make its iterator, or begin again with the one it keeps, and follow it."""
        kept = kept_iterator(loader)
        before = _followed.get(id(kept)) if kept is not None else None
        if before is not None:
            self._go_on_from(before, kept)
            iterator = make(loader)
        elif self._own is not None:
            iterator = make(loader)
        elif loader.num_workers > 0 and self._stream is None:
            iterator = self._make_with_workers(loader, make)
        else:
            iterator = make(loader)
            PendingIterator.stand_in(iterator, self)
        self._follow(iterator)
        return iterator

    def _make_with_workers(self, loader: Any, make: Callable[[Any], Any]) -> Any:
        seeds = self._seeds = Seeds(loader.num_workers, (loader.prefetch_factor or 2) + 1)
        script_init = loader.worker_init_fn
        loader.worker_init_fn = seeds.follower(script_init, self.given_states)
        try:
            iterator = make(loader)
        finally:
            loader.worker_init_fn = script_init
        iterator._worker_init_fn = script_init
        self.sent = [0] * loader.num_workers
        weakref.finalize(iterator, seeds.close).atexit = False
        return iterator

    def _go_on_from(self, before: Iteration, iterator: Any) -> None:
        """Continue the counts of persistent workers: how many batches each of them has made so far."""
        self._seeds = before._seeds
        self._creation = before._creation or before._before
        self._data = before._data
        self.given_states = before.given_states
        counts = before.made_until(iterator._send_idx)
        self.sent = [sent + count for sent, count in zip(before.sent, counts)]

    def _follow(self, iterator: Any) -> None:
        self.iterator = weakref.ref(iterator)
        _followed[id(iterator)] = self
        self.requests.watch(iterator)
        weakref.finalize(iterator, _followed.pop, id(iterator), None).atexit = False

    def note_first(self) -> None:
        """Record the states when the sampler is about to be asked for the first time."""
        self._first = states_of(self.gathered)

    # ---- while it runs -----------------------------------------------------------------------------------------------

    def made_until(self, index: int) -> list[int]:
        """Return how many batches before that one each worker has made in this pass."""
        workers = len(self.sent)
        return [len(range(_first_of(worker, self.base, workers), index, workers)) for worker in range(workers)]

    def taken(self, given: int) -> dict[str, Any]:
        """Return all that is needed to make it again, as plain values. The last `given` batches are returned again."""
        iterator = self.iterator()
        delivered = iterator._num_yielded - given
        return {
            "path": self.path,
            "signature": self.signature,
            "delivered": delivered,
            "before": self._before,
            "creation": self._creation,
            "first": self._first,
            "workers": self._workers_states(delivered),
            "now": beginning_of(self.gathered, iterator._index_sampler, self.path, of_sampler=True),
            "sums": self._sums_kept(),
            "data": self._data,
            "stream": None if self._stream is None else self._stream.taken(iterator),
            "state": None if self._own is None else self._own.taken(iterator),
        }

    def is_kept_by_loader(self) -> bool:
        """Return True if its loader keeps the iterator, whose workers persist."""
        return bool(self.sent) and bool(self.iterator()._persistent_workers)

    def is_over(self) -> bool:
        """Return True if it has given all its batches."""
        batches = self.signature["batches"]
        return batches is not None and bool(self.iterator()._num_yielded >= batches)

    def refusals(self, given: int) -> list[Refusal]:
        """Return why it could not be made again at its position."""
        iterator = self.iterator()
        found = [
            Refusal(f"the sampler of the loader at {step_text(self.path[-1])} holds other {name}, of no form", _REMADE)
            for name in sampler_inputs.not_kept(self._before["orders"])
        ]
        found += [
            Refusal(f"the data of the loader at {step_text(self.path[-1])} have other {name}, of no form", _REMADE)
            for name in sampler_inputs.not_kept(self._data)
        ]
        if any(self.sent) or any(self.made_until(iterator._num_yielded - given)):
            drawn, is_whole = sampler_rng.held_within([iterator._dataset])
            found += [Refusal(*_DRAWING)] if drawn else [] if is_whole else [Refusal(*_NOT_WHOLE)]
        if self._is_remade and self._stream is None:
            found.append(
                Refusal(f"each pass of the loader at {step_text(self.path[-1])} is over newly created data", _REMADE)
            )
        if self._is_of_unknown_length and self._stream is None:
            at = step_text(self.path[-1])
            found.append(Refusal(f"the data of the loader at {at} have another length than in its first pass", _REMADE))
        if self._own is not None:
            return [*found, *self._own.refusals(given)]
        if self._stream is not None:
            return self._stream.refusals(given, iterator)
        if self.sent and not getattr(iterator, "_in_order", True):
            found.append(Refusal("a loader gives batches in the order in which its workers finish them", _IN_ORDER))
        if self.sent and None in self._workers_states(iterator._num_yielded - given):
            found.append(Refusal("a worker of a loader did not report the state of its random generators", "ask again"))
        if given and not self.sent and self._draws(iterator):
            found.append(Refusal(*_OUTER_DRAWS))
        return found

    def _workers_states(self, delivered: int) -> list[Any]:
        """Return the states with which each worker starts its next batch; False for its initial states."""
        states: list[Any] = []
        made = self.made_until(delivered)
        for worker, (sent, count) in enumerate(zip(self.sent, made)):
            if sent + count == 0:
                states.append(self.given_states.get(worker, False))
            else:
                states.append(self._seeds.after(worker, sent + count) if self._seeds is not None else None)
        return states

    def _sums_kept(self) -> dict[str, int]:
        """Return the checksums of parts of the data that the script did not change since the first pass."""
        return {name: found for name, found in self._sums.items() if self._first_sums.get(name) == found}

    def _draws(self, iterator: Any) -> bool:
        """Return True if loading draws random numbers: then a batch in use cannot be loaded a second time."""
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        if fetcher is None or not hasattr(fetcher.dataset, "__len__") or not len(fetcher.dataset):
            return True
        if dataset_identity.counts(fetcher.dataset):
            return True
        before = rng.read_shared()
        try:
            fetcher.fetch([0] if iterator._auto_collation else 0)  # including what the collator draws
            return rng.read_shared() != before
        except Exception:  # noqa: BLE001 - a dataset of any make; what cannot be tried is not counted on
            return True
        finally:
            rng.set_shared(before)


class PendingIterator:
    """Replaces a sampler's iterator until it is first asked, so that later batches do not pass through our code."""

    def __init__(self, iterator: Any, iteration: Iteration) -> None:
        self._iterator = weakref.ref(iterator)
        self._iteration = iteration
        self._sampler = iterator._sampler_iter

    @classmethod
    def stand_in(cls, iterator: Any, iteration: Iteration) -> None:
        iterator._sampler_iter = cls(iterator, iteration)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        iterator = self._iterator()
        if iterator is not None and iterator._sampler_iter is self:
            iterator._sampler_iter = self._sampler
        self._iteration.note_first()
        return next(self._sampler)


_followed: dict[int, Iteration] = {}
_read_at: dict[Any, dataset_identity.DatasetSources] = {}
_sums_at: dict[Any, dict[str, int]] = {}
_REMADE = "make the dataset before the loop, so that a restarted script has the same data"
#: Workers that waited between two passes when the state was saved, and were not asked for the next one yet.
resting: list[dict[str, Any]] = []
_IN_ORDER = "let the loader keep their order (in_order=True)"
_DRAWING = (
    "a loader's workers draw from a random generator that the dataset holds, and cannot say where that is",
    "draw from Python's, NumPy's or PyTorch's own generators there, whose states in workers are kept",
)
_NOT_WHOLE = (
    "a loader's workers read a dataset that holds more objects than hegmd searches for random generators",
    "hold its rows in tensors, arrays or lists of numbers and texts",
)
_OUTER_DRAWS = (
    "a batch of an outer loop is in use, and its dataset draws random numbers, so that it cannot be loaded again",
    "use workers in the outer loader: their random states are kept",
)


def followed(iterator: object) -> Iteration | None:
    """Return the pass that this iterator makes now."""
    found = _followed.get(id(iterator))
    return found if found is not None and found.iterator() is iterator else None


def path_of_pass(iterator: object) -> Any:
    """Return where in the script the pass of this iterator started."""
    found = followed(iterator)
    return None if found is None else found.path


def all_followed() -> list[Iteration]:
    """Return every pass whose iterator is alive, in the order of their starts."""
    return sorted(
        (found for found in list(_followed.values()) if found.iterator() is not None), key=lambda it: it.number
    )


def _first_of(worker: int, base: int, workers: int) -> int:
    """Return the first batch from that one on that this worker makes."""
    return base + (worker - base) % workers

"""Makes a pass over a loader again in the restarted script, from the saved one.

The states of its start are set where the pass started, those of its first request where its sampler is first asked. The
sampler is asked for the used indices without loading data. Workers continue in turn at their positions.
"""

from __future__ import annotations

import sys

from ..code.position import step_text
from ..values.refusals import IncompatibleState
from . import sampler_inputs, stateful_loader
from .loaders import datasets_of, signature_of, unlike
from .pass_states import set_attributes, set_beginning, set_orders, set_states
from .passes import Iteration, PendingIterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class RebuiltPass(Iteration):
    """The saved pass, made again at the place where it started."""

    __slots__ = ()

    def begin_again(self, loader: Any, taken: Any, make: Callable[[Any], Any]) -> Any:
        """Make the saved pass. Leaves the random generators in an arbitrary state. Raises DoesNotFit."""
        set_orders(loader, taken["before"])
        self._set_data(loader, taken)
        self.signature = signature_of(loader)
        if dict(taken["signature"]) != self.signature:
            raise IncompatibleState([unlike(taken, self.signature)])
        if any(self._sums.get(name) != found for name, found in taken["sums"].items()):
            raise IncompatibleState([f"the loader at {step_text(taken['path'][-1])} has different data than before"])
        self._before, self._creation, self._first = taken["before"], taken["creation"], taken["first"]
        set_beginning(self.gathered, loader, self._creation or self._before)
        if self._own is not None:
            self._own.prepare(loader, taken["state"])
            iterator = make(loader)
        elif loader.num_workers > 0 and self._stream is None:
            iterator = self._again_with_workers(loader, taken, make)
        else:
            iterator = self._again_alone(loader, taken, make)
        self._follow(iterator)
        return iterator

    def _again_alone(self, loader: Any, taken: Any, make: Callable[[Any], Any]) -> Any:
        if self._stream is not None:
            self._stream.prepare(taken["stream"])
        iterator = make(loader)
        if self._first is None:
            PendingIterator.stand_in(iterator, self)
            return iterator
        if self._stream is not None:
            set_states(self.gathered, self._first)
            self._stream.go_on(iterator, taken["stream"], taken["delivered"])
            stateful_loader.note_given(iterator, taken["delivered"])
            return iterator
        set_states(self.gathered, self._first)
        _skip(iterator, taken["delivered"])
        stateful_loader.note_given(iterator, taken["delivered"])
        set_attributes(loader, taken["now"])
        return iterator

    def _again_with_workers(self, loader: Any, taken: Any, make: Callable[[Any], Any]) -> Any:
        """Set the positions when the first batch is sent to a worker: then everything else is there."""
        self.given_states = {worker: state for worker, state in enumerate(taken["workers"]) if state}
        delivered = self.base = taken["delivered"]
        beginning = self._before if self._creation is not None else None

        def place(iterator: Any) -> None:
            if beginning is not None:
                set_beginning(self.gathered, loader, beginning)
            _skip(iterator, delivered)
            iterator._send_idx = iterator._rcvd_idx = delivered
            for _ in range(delivered % iterator._num_workers):
                next(iterator._worker_queue_idx_cycle)

        return self._with_first_sending(loader, place, make)

    def rest_again(self, loader: Any, taken: Any, make: Callable[[Any], Any]) -> Any:
        """Create the workers that waited between two passes, and begin the next pass with their present states."""
        if dict(taken["signature"]) != self.signature:
            raise IncompatibleState([unlike(taken, self.signature)])
        now = self._before
        self._set_data(loader, taken)
        self._creation = taken["creation"] or taken["before"]
        self.given_states = {worker: state for worker, state in enumerate(taken["workers"]) if state}
        set_beginning(self.gathered, loader, self._creation)
        iterator = self._with_first_sending(loader, lambda _it: set_beginning(self.gathered, loader, now), make)
        self._follow(iterator)
        return iterator

    def _set_data(self, loader: Any, taken: Any) -> None:
        """Restore the data before workers get it: they would not see a later change."""
        self._data = taken["data"]
        for dataset, changed in zip(datasets_of(loader.dataset), self._data):
            sampler_inputs.set_back(dataset, changed)

    def _with_first_sending(self, loader: Any, place: Callable[[Any], None], make: Callable[[Any], Any]) -> Any:
        kind: Any = sys.modules["torch.utils.data.dataloader"]._MultiProcessingDataLoaderIter
        send = kind._try_put_index

        def place_first(iterator: Any) -> None:
            kind._try_put_index = send
            place(iterator)
            send(iterator)

        kind._try_put_index = place_first
        try:
            return self._make_with_workers(loader, make)
        finally:
            kind._try_put_index = send


def _skip(iterator: Any, batches: int) -> None:
    for index in range(batches):
        try:
            next(iterator._sampler_iter)
        except StopIteration:
            raise IncompatibleState(
                [f"a loader had given {batches} batches, and its sampler ends after {index}"]
            ) from None
    iterator._num_yielded = batches

"""torchdata's StatefulDataLoader: its passes are followed like those of PyTorch's loader, its workers' by its own
state.

Without workers it reads like any loader, and its sampler is brought to its position as usual. With workers, its
iterator keeps what each of them reports, and only its own `state_dict` restores them. It lacks the workers' random
numbers, so the script has to declare that its data are the same each time.
"""

from __future__ import annotations

import gc

from ..values import contents
from ..values.duck_types import class_of, is_a
from ..values.refusals import Refusal
from ..values.script_api import meet, replayed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_PACKAGE = "torchdata.stateful_dataloader"
MODULE = "torchdata.stateful_dataloader.stateful_dataloader"
_HINT = (
    "take the batches from hegm.resumable(loader, replay=True), which says that the data come the same each time; "
    "or num_workers=0, or PyTorch's DataLoader"
)


def expect(watch: Callable[[Any], object]) -> None:
    """Have that class watched, now or as soon as it is imported."""
    meet(MODULE, lambda module: watch(module.StatefulDataLoader))


def is_stateful(loader: Any) -> bool:
    return any(kind.__module__ == MODULE for kind in type(loader).__mro__)


def is_part(thing: Any) -> bool:
    """Return True for its iterators and those of its samplers: their `state_dict` is not the script's."""
    kind = class_of(thing)
    return str(kind.__module__).startswith(_PACKAGE) and hasattr(kind, "__next__")


def is_left(iterator: Any) -> bool:
    """Return True if only its loader refers to it, which keeps its last iterator."""
    if not is_part(iterator):
        return False
    return bool(iterator._finished) or not any(_is_holder(found) for found in gc.get_referrers(iterator))


def _is_holder(found: Any) -> bool:
    if is_a(found, dict) and "snapshot_every_n_steps" in found:  # the loader's own state
        return False
    if hasattr(found, "f_globals"):
        return str(found.f_globals.get("__name__")).rpartition(".")[0] != __name__.rpartition(".")[0]
    return not is_stateful(found) and not hasattr(found, "gi_frame")


def restores_by_own_state(loader: Any) -> bool:
    """Return True if only its own state restores it: workers read it."""
    return is_stateful(loader) and loader.num_workers > 0


class OwnLoaderState:
    """The state that a loader with workers reports itself."""

    def __init__(self, loader: Any) -> None:
        self._is_same_each_time = replayed(loader)

    def refusals(self, taken: int) -> list[Refusal]:
        """Return why it could not be restored."""
        if taken:
            return [
                Refusal(
                    "a batch of an outer loop over a StatefulDataLoader is in use",
                    "set num_workers=0 in the outer loader",
                )
            ]
        if not self._is_same_each_time:
            what = "a StatefulDataLoader's workers may draw random numbers, which are in no state of it"
            return [Refusal(what, _HINT)]
        return []

    @staticmethod
    def taken(iterator: Any) -> Any:
        return contents.loose(iterator.state_dict())

    @staticmethod
    def prepare(loader: Any, taken: Any) -> None:
        """Set its position, before it creates its iterator."""
        loader.load_state_dict(contents.owned(taken))


def note_given(iterator: Any, batches: int) -> None:
    """Set its count of batches, which it reports in the `state_dict` that the script can ask for."""
    if hasattr(iterator, "_sampler_iter_yielded"):
        iterator._sampler_iter_yielded = batches

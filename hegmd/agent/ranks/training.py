"""The recovered state of a training: its replicated state, and the state of each rank.

The replicated state is the same on all ranks after a step: parameters, buffers, optimizers and schedulers. A rank's own
state is its random state and the script's `extra`.
"""

from __future__ import annotations

import pickle
import random
import sys

from ..refusals import refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_HINT = "use `hegmctl run --recover`, which keeps the state of each rank"


class Training:
    """The objects that a script named. The modules, optimizers and schedulers are one each, or lists."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, extra: Mapping[str, Any] | None) -> None:
        """Raises HegmError for a model whose parameters differ between ranks."""
        self.models = _listed(model)
        self.optimizers = _listed(optimizer)
        self.schedulers = _listed(scheduler)
        self.extra = dict(extra or {})
        self._torch: Any = sys.modules["torch"]
        self._buffers: list[Any] = []
        for name, tensor in self._tensors().items():
            if hasattr(tensor, "placements"):
                raise refusal(f"parameter {name} is sharded over the ranks: no rank has the state of another", _HINT)

    def _tensors(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, model in enumerate(self.models):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                found[f"{number}.{name}"] = tensor.detach()
        return found

    # ---- the replicated state ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return it as a tree that shares memory with the training."""
        return {
            "tensors": self._tensors(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put it back. Raises what PyTorch raises if it does not fit, or KeyError."""
        with self._torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(state["tensors"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(self.schedulers, state["schedulers"]):
            scheduler.load_state_dict(saved)

    def keep_buffers(self) -> None:
        """Remember the buffers, which a forward pass changes: a step that fails must not have changed them."""
        held = [buffer for model in self.models for buffer in model.buffers()]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in held]

    def undo_step(self) -> None:
        """Be as before the step that has begun: buffers as they were, and no gradients."""
        with self._torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        self.end_step()

    def end_step(self) -> None:
        """Forget what belongs to one step."""
        self._buffers = []
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for model in self.models:
            model.zero_grad(set_to_none=True)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()

    # ---- of this rank -----------------------------------------------------------------------------------------------

    def own(self) -> bytes:
        """Return the random state of this process and `extra`."""
        numpy: Any = sys.modules.get("numpy")
        cuda: Any = self._torch.cuda
        found = {
            "python": random.getstate(),
            "torch": self._torch.get_rng_state().numpy().tobytes(),
            "cuda": [state.numpy().tobytes() for state in cuda.get_rng_state_all()] if cuda.is_initialized() else [],
            "numpy": None if numpy is None else numpy.random.get_state(),
            "extra": {name: one.state_dict() for name, one in self.extra.items()},
        }
        return pickle.dumps(found, pickle.HIGHEST_PROTOCOL)

    def restore_own(self, data: bytes) -> None:
        """Restore what `own` returned, in this process or in another one of this rank."""
        saved: Any = pickle.loads(data)  # noqa: S301 - of a rank of this job, by a memory of its user
        numpy: Any = sys.modules.get("numpy")
        random.setstate(saved["python"])
        self._torch.set_rng_state(self._tensor(saved["torch"]))
        if saved["cuda"]:
            self._torch.cuda.set_rng_state_all([self._tensor(state) for state in saved["cuda"]])
        if saved["numpy"] is not None and numpy is not None:
            numpy.random.set_state(saved["numpy"])
        for name, one in self.extra.items():
            one.load_state_dict(saved["extra"][name])

    def _tensor(self, data: bytes) -> Any:
        return self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)


def _listed(one: Any) -> list[Any]:
    if one is None:
        return []
    return [*one] if type(one) in (list, tuple) else [one]

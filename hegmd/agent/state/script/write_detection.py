"""By what it is seen that a tensor has been written to: PyTorch's count of its writes, and a sum over its bytes.

The count leaves out writes by way of `.data`, NumPy or a library's C, and there is none for tensors that were made in
`torch.inference_mode()`. The sum sees those. It is taken where a training begins, so within limits: of a large tensor
over parts of it, and not over all that a script may hold.
"""

from __future__ import annotations

import sys

from ..storage import checksums

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Tensors are added up to that size; of larger ones so many parts, over their whole length. So many at once, at most.
_WHOLE_BYTES = 16 << 20
_PART_BYTES, _PARTS = 1 << 16, 64
_MAX_SUMS, _MAX_SUMMED_BYTES = 2_000, 256 << 20


class Mark:
    """How one tensor was."""

    __slots__ = ("total", "version")

    def __init__(self, version: int | None, total: int | None) -> None:
        self.version = version
        self.total = total


class Marking:
    """Marks that are made at one moment: each memory is added up once, however many tensors lie in it."""

    def __init__(self) -> None:
        self._known: dict[Any, int | None] = {}
        self._left_bytes = _MAX_SUMMED_BYTES

    def mark(self, tensor: Any) -> Mark:
        """How this one is."""
        return Mark(_version_of(tensor), self._sum_of(tensor))

    def was_written_to(self, tensor: Any, before: Mark, *, is_late: bool) -> bool:
        """Whether it is not as it was, or may not be. `is_late` says that writes before that mark count as well."""
        version = _version_of(tensor)
        if version != before.version or (is_late and version != 0):
            return True
        return self._sum_of(tensor) != before.total if before.total is not None else version is None

    def _sum_of(self, tensor: Any) -> int | None:
        """None where it has no memory, or where it would take too long."""
        try:
            storage = tensor.untyped_storage()
            memory = (tensor.device, storage.data_ptr(), storage.nbytes())
            if memory not in self._known:
                self._known[memory] = self._added_up(tensor.device, storage)
            return self._known[memory]
        except (RuntimeError, NotImplementedError):  # sparse, or without memory
            return None

    def _added_up(self, device: Any, storage: Any) -> int | None:
        torch: Any = sys.modules["torch"]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # a copy would break it
        size_bytes: int = storage.nbytes()
        is_whole = size_bytes <= _WHOLE_BYTES
        self._left_bytes -= size_bytes if is_whole else _PART_BYTES * _PARTS
        if self._left_bytes < 0 or len(self._known) >= _MAX_SUMS:
            return None
        with torch.no_grad():
            raw = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            if not is_whole:
                step_bytes = (size_bytes - _PART_BYTES) // (_PARTS - 1)
                raw = raw.as_strided((_PARTS, _PART_BYTES), (step_bytes, 1)).contiguous()
            raw = raw.cpu()
        return checksums.sum_of(raw.data_ptr(), raw.numel())


def _version_of(tensor: Any) -> int | None:
    """How often it was written to, as PyTorch counts; None where it does not."""
    return None if tensor.is_inference() else int(tensor._version)

"""Access between GPUs of this process: disabled before the driver's checkpoint.

The driver can checkpoint a process with such access but never restores it (580.159.04). Without it, the process is
restored with all bytes; then access is refused to it permanently, and copies between its GPUs go through host memory.
PyTorch requests access at the first copy between two GPUs, and fails if that is refused. So the agent lets it make one
such copy for each pair while access is possible: PyTorch remembers that and does not request it again.

Owns which pairs had access. Called in the agent's thread while the training thread is parked.
"""

from __future__ import annotations

from ..errors import HegmError
from . import cuda_state
from .cuda_driver import PeerAccess
from .notes import note
from .refusals import refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HINT = "leave the job on its GPUs; it was not changed"


class Peers:
    """The GPUs of this process that access one another's memory."""

    def __init__(self) -> None:
        self._parted: list[tuple[int, int]] = []

    def part(self) -> int:
        """Disable all access; returns the number of pairs. Raises HegmError, with access unchanged, if that fails."""
        torch = cuda_state.in_use()
        if torch is None:
            raise refusal("its access between GPUs is unknown: it does not use PyTorch on them", _HINT)
        if cuda_state.maps_for_peers(torch):
            raise refusal("its allocator maps memory of one GPU for the others, which cannot be disabled", _HINT)
        access = PeerAccess()
        pairs = [(one, other) for one in access.devices() for other in access.devices() if one != other]
        try:
            _have_noted(torch, [pair for pair in pairs if access.is_possible(*pair)])
            for pair in pairs:
                if access.end(*pair):
                    self._parted.append(pair)  # one by one, so that all are restored if the next one fails
        except Exception as error:
            self.rejoin()
            why = error.message if isinstance(error, HegmError) else repr(error)
            raise refusal(f"its access between GPUs could not be disabled: {why}", _HINT) from error
        note(f"access of {len(self._parted)} pairs of GPUs is undone")
        return len(self._parted)

    def rejoin(self) -> None:
        """Enable access again for these pairs; possible only if the process was not checkpointed meanwhile."""
        parted, self._parted = self._parted, []
        if not parted:
            return
        try:
            access = PeerAccess()
            answers = [access.begin(*pair) for pair in parted]
        except (HegmError, OSError) as error:
            note(f"peer access between GPUs was not restored: {error!r}")
            return
        note(f"access of {len(parted)} pairs of GPUs: {answers}")


def _have_noted(torch: Any, pairs: list[tuple[int, int]]) -> None:
    """Make PyTorch copy once over each pair, then free the memory, so that PyTorch knows the new peer access."""
    for one, other in pairs:
        torch.zeros(1, device=f"cuda:{one}").to(f"cuda:{other}")
    for device in sorted({device for pair in pairs for device in pair}):
        torch.cuda.synchronize(device)
    cuda_state.give_back(torch)

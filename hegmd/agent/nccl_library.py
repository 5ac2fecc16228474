"""The NCCL library that this process has loaded: its version, and suspending a communicator's GPU memory.

Never loads a library. `ncclCommSuspend` releases the GPU memory that a communicator maps from its peers and keeps the
communicator itself (NCCL 2.29.7). Both calls wait for all ranks of the communicator, and a second call on the same
communicator is an error of the caller. Owns the binding to these calls.
"""

from __future__ import annotations

import ctypes

from .refusals import DEBUG_HINT, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: The first version that can suspend: 2.29.7.
SUSPENDS_SINCE = 22907
_SUSPEND_MEMORY = 1  # NCCL_SUSPEND_MEM
_NEW_NUMBERS = 20_900  # from 2.9.0 on there are two digits for the minor version
_HINT = "set NCCL_DEBUG=INFO and start the job again to see NCCL's own messages"
_LOADED_ONLY = 4 | 2  # RTLD_NOLOAD and RTLD_NOW


class Library:
    """A loaded copy of NCCL. Raises HegmError if it cannot be used."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path, mode=_LOADED_ONLY)
            version = ctypes.c_int()
            code = self._library.ncclGetVersion(ctypes.byref(version))
        except (OSError, AttributeError) as error:
            raise refusal(f"NCCL at {path} cannot be called: {error}", DEBUG_HINT) from error
        if code:
            raise refusal(f"ncclGetVersion of {path} answered {code}", DEBUG_HINT)
        self.version = version.value

    @property
    def text(self) -> str:
        """Return its version in NCCL's form, such as 2.29.7."""
        major, rest = divmod(self.version, 10_000 if self.version >= _NEW_NUMBERS else 1000)
        return f"{major}.{rest // 100}.{rest % 100}"

    @property
    def can_suspend(self) -> bool:
        """Return True if it has `ncclCommSuspend`."""
        return self.version >= SUSPENDS_SINCE and self._has("ncclCommSuspend") and self._has("ncclCommResume")

    def suspend(self, communicator: int) -> None:
        """Release its GPU memory. Waits for all its ranks. Raises HegmError."""
        self._check("ncclCommSuspend", self._library.ncclCommSuspend(ctypes.c_void_p(communicator), _SUSPEND_MEMORY))

    def resume(self, communicator: int) -> None:
        """Allocate its GPU memory again. Waits for all its ranks. Raises HegmError."""
        self._check("ncclCommResume", self._library.ncclCommResume(ctypes.c_void_p(communicator)))

    def _has(self, name: str) -> bool:
        try:
            getattr(self._library, name)
        except AttributeError:
            return False
        return True

    def _check(self, call: str, code: int) -> None:
        if code:
            raise refusal(f"{call} answered {code} ({self._meaning(code)}) in NCCL {self.text}", _HINT)

    def _meaning(self, code: int) -> str:
        if not self._has("ncclGetErrorString"):
            return "no text"
        text: Any = self._library.ncclGetErrorString
        text.restype = ctypes.c_char_p
        return (text(code) or b"no text").decode(errors="replace")

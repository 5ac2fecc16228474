"""Variables of the environment that nothing in this process can have read yet, so that they may still change.

Few, and by what is known of who reads them: of any other it cannot be said that no import has looked at it, and many
are looked at then (OMP_NUM_THREADS by OpenMP, MKL_* by MKL, PYTORCH_* and TORCH_* by PyTorch).

Which GPUs a process has is read by NVIDIA's driver in `cuInit` and never again. Whether that was called is asked of the
driver itself: any other of its functions then answers 3, CUDA_ERROR_NOT_INITIALIZED. A process in which the driver's
library was not even loaded cannot have called it. PyTorch reads the same variable by itself only when it counts GPUs,
and keeps what it has found only once CUDA is initialised. ROCm's runtime reads its own when it is loaded, as far as
anybody can say: there nothing may change.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CUDA = "CUDA_VISIBLE_DEVICES"
# Read by the agent alone, and by PyTorch for ROCm and AMD's runtime, neither of which is here.
_OURS, _AMDS = ("HEGM_GPU",), ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_DRIVER = "libcuda.so"
_NOT_INITIALIZED = 3


def unread() -> list[str]:
    """Their names."""
    version = sys.modules.get("torch.version")
    if getattr(version, "hip", None) is not None:
        return [*_OURS]
    return [*_OURS, *_AMDS, *([CUDA] if _is_driver_untouched() else [])]


def _is_driver_untouched() -> bool:
    """Whether nobody has had NVIDIA's driver look at the environment."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            paths = {line.rstrip("\n").partition("/")[2] for line in file if _DRIVER in line}
    except OSError:
        return False
    if not paths:
        return True
    if os.environ.get(CUDA, "0").strip() in ("", "-1"):
        return False  # a cuInit that has found no GPU has failed, which is not to be told from one that was not called
    return all(_answer(f"/{path}") == _NOT_INITIALIZED for path in paths)


def _answer(path: str) -> int | None:
    """What that library says of the number of GPUs; None where it cannot be asked."""
    ctypes: Any = __import__("ctypes")
    try:
        return int(ctypes.CDLL(path).cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
    except (OSError, AttributeError):
        return None

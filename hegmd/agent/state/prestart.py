"""Reports what a prestarted process can import while this one still trains: PyTorch, and nothing else.

Only if the script cannot notice. Its environment has to be the one that it started with, since a script that sets a
variable before it imports PyTorch wants PyTorch to see it. Its supervisor has to be its parent.
"""

from __future__ import annotations

import os
import sys

from ..notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

#: Variables of a process with a launcher between itself and its supervisor.
_LAUNCHED = (b"RANK", b"HEGM_LAUNCHER")
# Variables that Python and PyTorch set themselves; they are read long after imports.
_BY_THEMSELVES = frozenset(
    b"LC_CTYPE CUDA_MODULE_LOADING TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR KMP_DUPLICATE_LIB_OK "
    b"DISABLE_CUPTI_LAZY_REINIT TEARDOWN_CUPTI".split()
)
_OURS = b"HEGM_"
_ALSO = "numpy"
_TORCH = "torch"
# Modules that import packages other than PyTorch's own, or that act on import: before PyTorch 2.4 the
# inductor's forked off processes that compile.
_LEFT_OUT = ("torch.utils.tensorboard", "torch.testing", "torch._inductor")
# PyTorch has about 1,100 modules once an optimizer is made.
_MAX_MODULES, _MAX_FOLDERS = 4000, 200


class PrestartModules:
    """The modules in the order of their imports, and the path that they are found by."""

    __slots__ = ("modules", "path")

    def __init__(self, modules: tuple[str, ...] = (), path: tuple[str, ...] = ()) -> None:
        self.modules = modules
        self.path = path


def beforehand(*, is_launched: bool = False) -> PrestartModules:
    """Return what can be imported for the script of this process; nothing if the script could notice.

    `is_launched` is True for a rank whose launcher is its supervisor.
    """
    path: tuple[Any, ...] = tuple(sys.path)
    is_other = not is_launched and any(name in os.environb for name in _LAUNCHED)
    if _TORCH not in sys.modules or is_other or _has_changed(os.environb):
        return PrestartModules()
    modules = tuple([name for name in list(sys.modules) if _is_wanted(name)])
    if len(modules) > _MAX_MODULES or len(path) > _MAX_FOLDERS or not all(isinstance(one, str) for one in path):
        return PrestartModules()
    return PrestartModules(modules, path)


def _is_wanted(name: str) -> bool:
    if name.startswith(_LEFT_OUT):
        return False
    return name in (_TORCH, _ALSO) or name.startswith(_TORCH + ".")


def _has_changed(environ: Mapping[bytes, bytes]) -> bool:
    """Return True if the script, or a module that it imported, has set or removed variables."""
    try:
        with open("/proc/self/environ", "rb") as file:
            began = dict(_pairs(file.read().split(b"\0")))
    except OSError:
        return True
    for name, value in _given_by_turn().items():
        if value is None:
            began.pop(name, None)
        else:
            began[name] = value
    before, now = _counted(began), _counted(environ)
    changed = [os.fsdecode(name) for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if changed:
        note(f"the next process imports nothing before its turn, as this one has changed {', '.join(changed)}")
    return bool(changed)


def _given_by_turn() -> Mapping[bytes, bytes | None]:
    """Return the variables that were set or removed when this process was activated."""
    standby: Any = sys.modules.get(__name__.rsplit(".", 2)[0] + ".standby")
    imported: Mapping[bytes, bytes | None] = {} if standby is None else standby.by_turn
    return imported


def _pairs(words: Iterable[bytes]) -> Iterable[tuple[bytes, bytes]]:
    for word in words:
        name, has_value, value = word.partition(b"=")
        if has_value:
            yield name, value


def _counted(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in environ.items() if name not in _BY_THEMSELVES and not name.startswith(_OURS)}

"""Where msgpack comes from: the installed package for daemon and client, hegmd's own pure-Python one inside a worker.

A worker's environment has any msgpack or none, of any age, and whatever the agent imported by that name would be what
the script gets. So under the agent's private name msgpack's pure-Python module is loaded by path, from beside hegmd or
from the folder that HEGM_MSGPACK names (`hegmctl run` sets it), under a private name as well. Its C module is of no use
there: it is made for one version of Python.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

_PRIVATE = "_hegm_msgpack"
_PURE = "fallback.py"


def load(package: str) -> ModuleType:
    """The module with `unpackb` and `Packer`, for hegmd under that package name. Raises ImportError."""
    if package != "hegmd":
        for folder in _own_folders():
            if os.path.exists(os.path.join(folder, _PURE)):
                return _load_pure(folder)
    import msgpack

    return msgpack


def _own_folders() -> list[str]:
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    named = os.environ.get("HEGM_MSGPACK")
    return [os.path.join(os.path.dirname(here), "msgpack"), *([named] if named else [])]


def _load_pure(folder: str) -> ModuleType:
    from importlib import import_module

    if _PRIVATE not in sys.modules:
        package = type(sys)(_PRIVATE)
        package.__path__ = [folder]
        sys.modules[_PRIVATE] = package
    return import_module(_PRIVATE + "." + _PURE[: -len(".py")])

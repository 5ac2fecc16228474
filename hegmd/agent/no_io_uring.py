"""torchrun without io_uring: CRIU can dump no process that has one, and its launcher has two before it starts a rank.

They belong to libuv, by which the store listens that the ranks meet at. PyTorch has another server for that, and the
variable USE_LIBUV for choosing it, which torchrun's own stores do not go by: here they do. `hegmctl run` sets it to 0
where nobody else has set it. Nothing but the launcher is touched.
"""

from __future__ import annotations

import os
import sys

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_VARIABLE, _ARGUMENT = "USE_LIBUV", "use_libuv"
# Where it stands among the arguments of a store, for whoever does not name it.
_PLACE = 8


def choose_stores(_module: Any) -> None:
    """Have stores that are made from here on go by the variable. `_module` is torchrun's table of rendezvous."""
    distributed: Any = sys.modules.get("torch.distributed")
    store = getattr(distributed, "TCPStore", None)
    if os.environ.get(_VARIABLE) != "0" or store is None:
        return
    if _ARGUMENT not in (store.__init__.__doc__ or ""):  # this PyTorch has no libuv
        return

    def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: N807 - of the class below
        if len(args) <= _PLACE:
            named.setdefault(_ARGUMENT, False)
        store.__init__(self, *args, **named)

    kept = {name: getattr(store, name) for name in ("__module__", "__qualname__", "__doc__")}
    distributed.TCPStore = type(store.__name__, (store,), {**kept, "__init__": __init__})
    note("this launcher's stores do without libuv")

"""A pretend PyTorch with what the agent hooks: loaders' iterators and the list of every optimizer's hooks. No tensors.

For Pythons for which PyTorch is not to be had here. A text file beside it is mapped under a name as PyTorch's libraries
have, because hegmctl looks for those.
"""

import mmap
from pathlib import Path
from types import SimpleNamespace

from . import optim, utils

__version__ = "2.99.0+stub"
__all__ = ["compiler", "optim", "utils"]

compiler = SimpleNamespace(is_compiling=lambda: False)
with (Path(__file__).parent / "libtorch_stub.so").open("rb") as _file:
    _mapped = mmap.mmap(_file.fileno(), 0, access=mmap.ACCESS_READ)

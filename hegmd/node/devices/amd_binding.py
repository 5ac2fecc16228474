"""The only importer of AMD SMI's Python binding: whether it can be imported safely, and whether it fits its library.

Without its C library the binding prints to stdout and raises KeyError on import. So the library is looked up first, in
the places that the binding searches. ROCm's own binding is preferred: the layout of structs changes between versions,
and an old binding would let a newer library write beyond its buffers. Before `check_fit`, only the library's start and
its version may be called.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

LIBRARY = "libamd_smi.so"
DEFAULT_ROCM = "/opt/rocm"
_SHIPPED_BINDING = Path("share") / "amd_smi" / "amdsmi"

# The first number of a library's version counts the changes of its layout. Packages of the binding on PyPI count like
# ROCm, those that ROCm ships like the library.
_LAYOUT_OF_ROCM = {7: 26}
_FIRST_LAYOUT = 20


class AmdSmiUnusable(Exception):
    """AMD SMI cannot be used, for that reason. The kernel's files still can."""


def check_fit(binding: Any) -> str:
    """Return the version of the initialised library. Raises Unfit if the binding does not fit."""
    version = binding.amdsmi_wrapper.amdsmi_version_t()
    status = binding.amdsmi_wrapper.amdsmi_get_lib_version(ctypes.byref(version))
    if status != 0:
        raise AmdSmiUnusable(f"AMD SMI does not report its version (status {status})")
    names = [str(field[0]) for field in version._fields_]
    numbers = [int(getattr(version, name)) for name in names if name in {"year", "major", "minor", "release"}]
    library = ".".join(str(number) for number in numbers)
    theirs = str(getattr(binding, "__version__", "")) or "of an unknown version"
    first = theirs.partition(".")[0]
    made_for = int(first) if first.isdigit() else 0
    layout = made_for if made_for >= _FIRST_LAYOUT else _LAYOUT_OF_ROCM.get(made_for)
    # With "year" first it is the layout of ROCm 6, and earlier.
    if layout is None or "year" in names or numbers[0] != layout:
        raise AmdSmiUnusable(f"the library of AMD SMI is {library}, but its binding is made for {theirs}")
    return library


def load_binding(rocm: Path) -> ModuleType:
    """Return the binding of ROCm or of our environment. Raises Unfit."""
    loaded = sys.modules.get("amdsmi")
    if loaded is not None:
        return loaded
    shipped = rocm / _SHIPPED_BINDING
    if not _find_library(shipped):
        raise AmdSmiUnusable(f"the library of AMD SMI, {LIBRARY}, is not installed")
    try:
        return _import_from(shipped) if (shipped / "__init__.py").is_file() else _import_installed()
    except ImportError:
        raise AmdSmiUnusable("the Python package amdsmi is not installed") from None
    except (AttributeError, KeyError) as error:
        # It looks up every function of the library while it is imported.
        raise AmdSmiUnusable(f"the library of AMD SMI lacks what its binding needs ({error})") from None
    finally:
        if "amdsmi" not in sys.modules:
            for name in [name for name in sys.modules if name.startswith("amdsmi.")]:
                del sys.modules[name]


def _find_library(shipped: Path) -> bool:
    """Check that the binding will find its library, in the places that it searches."""
    root = os.environ.get("ROCM_HOME", os.environ.get("ROCM_PATH"))
    places = [f"{root}/lib/{LIBRARY}"] if root else []
    places += [LIBRARY, str(shipped / LIBRARY), f"{os.environ.get('ROCM_PATH', DEFAULT_ROCM)}/lib/{LIBRARY}"]
    for place in places:
        try:
            ctypes.CDLL(place)
        except OSError:
            continue
        return True
    return False


def _import_installed() -> ModuleType:
    import amdsmi  # noqa: TID251 - the only module that may import it

    return cast("ModuleType", amdsmi)


def _import_from(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "amdsmi", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(str(folder))
    module = importlib.util.module_from_spec(spec)
    sys.modules["amdsmi"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["amdsmi"]
        raise
    return module

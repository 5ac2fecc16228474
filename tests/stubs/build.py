"""Builds the stub vendor libraries that the tests load in place of a driver's.

`build_stub("nvml", folder)` compiles tests/stubs/nvml/*.c once per content of these sources and puts a copy, under the
name that the vendor gives its library, into `folder`. A copy for each caller because the dynamic loader takes two files
for one library when they are the same file: with a copy, each test has a library with a state of its own, and can
replace it on disk as a driver's upgrade does.

`hide` takes functions out of what the library exports, as in an older version of it: looking them up then fails for
the binding, which no answer of the stub could bring about.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.patience import HANG_S

SOURCES = Path(__file__).resolve().parent
CACHE = SOURCES.parent.parent / "build" / "stubs"
COMPILER = os.environ.get("CC", "cc")
# Symbolic: two of these in one process must not find their own functions in each other.
FLAGS = (
    "-std=gnu11",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-shared",
    "-fPIC",
    "-pthread",
    "-Wl,-Bsymbolic",
    f"-I{SOURCES}",
)
# The name that each vendor's binding asks the dynamic loader for; `grace` and `halt` are no vendor's, and are loaded by
# LD_PRELOAD.
FILE_NAMES = {
    "nvml": "libnvidia-ml.so.1",
    "amdsmi": "libamd_smi.so",
    "cuda": "libcuda.so.1",
    "grace": "grace.so",
    "halt": "halt.so",
    "nccl": "libnccl.so.2",
}
# Sources that a stub shares with another: NVML and CUDA describe the same node.
SHARED = {"nvml": ("cuda/node.c", "cuda/node.h")}


def build_stub(name: str, folder: Path, *, hide: Sequence[str] = ()) -> Path:
    """The path of a stub library of its own in `folder`. Raises RuntimeError with the compiler's words."""
    built = _compiled(name, tuple(sorted(hide)))
    target = folder / FILE_NAMES[name]
    fresh = target.with_suffix(".new")
    shutil.copyfile(built, fresh)
    fresh.replace(target)  # never into the file itself: it may be mapped
    return target


def _compiled(name: str, hide: tuple[str, ...]) -> Path:
    sources = sorted((SOURCES / name).glob("*.[ch]"))
    if not sources:
        raise FileNotFoundError(f"there is no stub {name} in {SOURCES}")
    sources += [SOURCES / shared for shared in SHARED.get(name, ())]
    digest = hashlib.sha256("\0".join((COMPILER, *FLAGS, *hide)).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    built = CACHE / f"{name}-{digest.hexdigest()[:16]}.so"
    if not built.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _compile([source for source in sources if source.suffix == ".c"], Path(scratch), hide, FILE_NAMES[name])
            (Path(scratch) / "stub.so").replace(built)  # at once, so that two builders do not meet in it
    return built


def _compile(sources: Sequence[Path], scratch: Path, hide: Sequence[str], so_name: str) -> None:
    exports = scratch / "exports"
    exports.write_text("{ global: *; local: " + "".join(f"{function}; " for function in hide) + "};" if hide else "{};")
    command = [COMPILER, *FLAGS, f"-Wl,-soname,{so_name}", f"-Wl,--version-script={exports}"]
    done = subprocess.run(
        [*command, "-o", scratch / "stub.so", *sources], capture_output=True, text=True, check=False, timeout=HANG_S
    )
    if done.returncode:
        raise RuntimeError(f"{COMPILER} could not build the stub {so_name}:\n{done.stderr}")

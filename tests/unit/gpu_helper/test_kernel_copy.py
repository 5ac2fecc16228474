"""The GPU program is built from the source next to it."""

from __future__ import annotations

import base64
import shutil
import subprocess
import textwrap
import zlib
from pathlib import Path

import pytest

from hegmd.gpu_helper import kernel_copy
from tests.patience import HANG_S

RELEASE = "V13.0.88"


def _built(folder: Path) -> bytes:
    """Build with the compiler and options that the docstring names; other releases produce other code."""
    nvcc = shutil.which("nvcc") or ""
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout if nvcc else ""
    if RELEASE not in output:
        pytest.skip(f"there is no nvcc {RELEASE}")
    source, program = folder / "copy.cu", folder / "copy.cubin"
    text = kernel_copy.__doc__ or ""
    source.write_text(textwrap.dedent(text[text.index("    extern") :]))
    words = text.partition("`nvcc ")[2].partition("`")[0].split()
    subprocess.run([nvcc, *words, source, "-o", program], check=True, capture_output=True, timeout=HANG_S)
    return program.read_bytes()


@pytest.mark.thorough
def test_the_program_matches_its_source(tmp_path: Path) -> None:
    """To the byte: the source shows what runs next to a job's memory."""
    assert _built(tmp_path) == zlib.decompress(base64.b64decode(kernel_copy._PROGRAM))

"""The output of nvidia-smi as plain values: the reference for hegmd's inventory on real hardware.

A value that nvidia-smi shows as N/A, in any of its spellings, is None. Nothing here knows hegmd.
"""

from __future__ import annotations

import re
import shutil
import subprocess

from tests.patience import HANG_S

PROGRAM = "nvidia-smi"
_NOT_KNOWN = re.compile(
    r"^\[?(n/a|not supported|unknown error|requested functionality has been deprecated)\]?$", re.IGNORECASE
)


def is_there() -> bool:
    return shutil.which(PROGRAM) is not None


def run(*arguments: str) -> str:
    """Its output. Raises CalledProcessError or TimeoutExpired."""
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=True, timeout=HANG_S).stdout


def known(text: str) -> str | None:
    return None if not text.strip() or _NOT_KNOWN.match(text.strip()) else text.strip()


def query(kind: str, fields: list[str]) -> list[dict[str, str | None]]:
    """Return one row for each object of that kind: gpu, compute-apps, remapped-rows."""
    output = run(f"--query-{kind}={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = [[known(cell) for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def compute_apps() -> dict[tuple[int, str], int | None]:
    """MiB by pid and UUID."""
    rows = query("compute-apps", ["pid", "gpu_uuid", "used_gpu_memory"])
    return {
        (int(row["pid"] or 0), row["gpu_uuid"] or ""): None
        if row["used_gpu_memory"] is None
        else int(row["used_gpu_memory"])
        for row in rows
    }


def cuda_version() -> str | None:
    """Return the version of the driver, from the banner."""
    found = re.search(r"CUDA Version\s*:\s*([\d.]+)", run())
    return found and found[1]


def topology() -> tuple[dict[tuple[int, int], str], dict[int, str | None]]:
    """The connection of each pair (NV18, PIX, SYS and so on), and each GPU's NUMA affinity."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in run("topo", "-m").splitlines()]
    header = [cell.strip() for cell in lines[0].split("\t")]
    pairs: dict[tuple[int, int], str] = {}
    affinity: dict[int, str | None] = {}
    for line in lines[1:]:
        cells = [cell.strip() for cell in line.split("\t")]
        if not (row := re.fullmatch(r"GPU(\d+)", cells[0])):
            continue
        for name, cell in zip(header, cells, strict=False):
            if (column := re.fullmatch(r"GPU(\d+)", name)) and column[1] != row[1]:
                pairs[int(row[1]), int(column[1])] = cell
            elif name == "NUMA Affinity":
                affinity[int(row[1])] = known(cell)
    return pairs, affinity

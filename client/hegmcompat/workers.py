"""The launchers and their workers, in HeGM's form: the file `.workers/LAUNCHER` contains the worker's pid.

Also reads what the kernel reports of a worker: its parents, its open GPUs, its reaction to SIGUSR1. A pid in a file is
only a claim; a process is signalled through a pidfd that was opened before the claim was checked.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from hegmcompat import private_files

REGISTRY = ".workers"
# NVIDIA's as HeGM looks for them; AMD's beside them.
GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")
_DEEPEST = 64
_PID_BYTES = 32
_IN_EFFECT = ("SigBlk:", "SigIgn:", "SigCgt:")


def register(folder: Path, launcher_pid: int, worker_pid: int) -> None:
    """Say that this launcher supervises that worker. Raises OSError and HegmError."""
    private_files.make_folder(folder / REGISTRY)
    private_files.write(folder / REGISTRY / str(launcher_pid), str(worker_pid).encode())


def unregister(folder: Path, launcher_pid: int) -> None:
    with suppress(OSError):
        (folder / REGISTRY / str(launcher_pid)).unlink()


def registered(folder: Path) -> dict[int, int]:
    """Return each launcher with its worker, both alive. Removes the entries of launchers that are gone."""
    found: dict[int, int] = {}
    try:
        names = sorted(os.listdir(folder / REGISTRY))
    except OSError:
        return found
    for name in names:
        if not private_files.is_number(name):
            continue
        launcher_pid = int(name)
        if not is_alive(launcher_pid):
            unregister(folder, launcher_pid)
            continue
        text = private_files.read(folder / REGISTRY / name, _PID_BYTES) or b""
        if text.strip().isdigit() and is_alive(int(text)):
            found[launcher_pid] = int(text)
    return found


def launcher_of(pid: int, launchers: dict[int, int]) -> int | None:
    """Return the launcher that supervises the process, also through a shell in between."""
    for launcher_pid, worker_pid in launchers.items():
        if pid == worker_pid:
            return launcher_pid
    parent = _parent_of(pid)
    for _ in range(_DEEPEST):
        if parent is None or parent <= 0:
            return None
        if parent in launchers:
            return parent
        parent = _parent_of(parent)
    return None


def is_alive(pid: int) -> bool:
    return pid > 0 and os.path.exists(f"/proc/{pid}")


def uses_gpu(pid: int, devices: tuple[str, ...] = GPU_DEVICES) -> bool:
    """Return True if the process has a GPU's device open; False if unknown."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(devices):
                return True
    return False


def survives_request(pid: int) -> bool:
    """Return True if the process catches, blocks or ignores SIGUSR1, which ends other processes."""
    bit = 1 << (signal.SIGUSR1 - 1)
    return any(int(line.split()[1], 16) & bit for line in _status(pid) if line.startswith(_IN_EFFECT))


def _parent_of(pid: int) -> int | None:
    for line in _status(pid):
        if line.startswith("PPid:"):
            return int(line.split()[1])
    return None


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return []

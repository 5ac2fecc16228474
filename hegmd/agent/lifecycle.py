"""Starts the agent in this process: its gate and its thread. Disables both in a forked child.

The first import of a training framework starts the agent. A forked child keeps the hooks with an inert gate, and has
neither thread nor socket: a forked child that trains is not migrated.

A forked child, such as a loader's worker, also drops the mappings and descriptors of NVIDIA's devices that it
inherits. It cannot use them, because CUDA does not work across a fork, and CRIU cannot dump them. A child of a parent
without CUDA keeps everything: NVML's descriptors, which it may use, differ only by `/dev/nvidia-uvm`. All this runs
right after the fork, where only the forking thread exists, so `prepare_for_forks` reads what it needs beforehand.
"""

from __future__ import annotations

import ctypes
import os
from _thread import start_new_thread
from time import sleep

from .notes import note
from .quiesce import Gate
from .signals import release_in_child
from .trap import collect_again

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .channel import Channel
    from .lending import Lending


PAUSE_S = 1.0
# Set by a supervisor that was asked to truncate what a recovered script has appended to files.
FOLLOWS_OUTPUTS = "HEGM_TRUNCATE_OUTPUTS"

_gate: Gate | None = None
_is_started = False
_channel: Channel | None = None

DEVICES = "/dev/nvidia"
CUDA_ONLY_SUFFIX = "-uvm"

_munmap = ctypes.CDLL(None).munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_munmap.restype = ctypes.c_int


def gate() -> Gate:
    """Return the process's gate, which does nothing until `start`."""
    global _gate  # noqa: PLW0603 - one agent a process
    if _gate is None:
        _gate = Gate()
    return _gate


def start() -> Gate:
    """Start the agent's thread once, and return the gate for its hooks. Never raises."""
    global _is_started  # noqa: PLW0603 - one agent a process
    made = gate()
    if _is_started:
        return made
    _is_started = True
    try:
        begin(os.environ)
    except Exception as error:  # noqa: BLE001 - top level: the script continues, with hooks that nothing uses
        note(f"not started: {error!r}")
    return made


def lending() -> Lending | None:
    """Return what `hegm.released()` uses; None if the agent's thread could not be started."""
    start()
    return None if _channel is None else _channel.lending


def begin(environ: Mapping[str, str], unknown: Sequence[str] | None = None) -> Gate:
    """Start the agent's thread with those variables. `unknown` lists the facts that are missing because the
    agent was attached late.

    Raises what prevents the start.
    """
    global _is_started, _channel  # noqa: PLW0603 - one agent a process
    # Python takes the thread that imports `threading` first for its main thread, and 3.9 waits for it at its end.
    __import__("threading")
    # Imported here and not in our thread: beside a busy loop every file read there waits for the GIL.
    from . import storage_transfer
    from .channel import Channel

    storage_transfer.load()
    if environ.get(FOLLOWS_OUTPUTS):
        from .state.script import output_files

        output_files.follow()
    _channel = Channel(gate(), environ, unknown)
    _is_started = True
    os.register_at_fork(after_in_child=_orphan)
    start_new_thread(_live, (_channel,))
    return gate()


def note_restarted(step: int | None = None) -> None:
    """Notify the daemon that the state of an operation, or of the snapshot of that step, is restored here."""
    from .departing import OPERATION

    if _channel is not None:
        _channel.note_restarted(os.environ.get(OPERATION) or None, step)


def _live(channel: Channel) -> None:
    """Run the agent's thread as long as the process lives, since only it can reload offloaded bytes."""
    note("started")
    while True:
        try:
            attend(channel)
        except BaseException as error:  # noqa: BLE001 - raised here by another thread
            note(f"ended: {error!r}; restarting")


def attend(channel: Channel) -> None:
    """Run the connection once, then pause, so that an error that ends it each time does not use a processor."""
    try:
        channel.run()
    except BaseException as error:  # noqa: BLE001 - the end of the thread: no other thread may stay parked
        note(f"ended: {error!r}; restarting")
    try:
        channel.hang_up()
    except BaseException as error:  # noqa: BLE001 - the same
        note(f"not hung up: {error!r}; restarting")
    sleep(PAUSE_S)


def _orphan() -> None:
    """Disable the agent in a forked child."""
    if _gate is not None:
        _gate.make_inert()
    collect_again()
    release_in_child()
    if _channel is not None:
        _channel.close_in_child()
    leave_gpu()


def leave_gpu(devices: str = DEVICES) -> int:
    """Unmap and close what belongs to devices with these path prefixes; returns how many mappings and descriptors."""
    held = _descriptors(devices)
    if not any(path.startswith(devices + CUDA_ONLY_SUFFIX) for path in held.values()):
        return 0
    dropped = sum([int(_munmap(start, size_bytes) == 0) for start, size_bytes in _ranges(devices)])
    for fd in held:
        try:
            os.close(fd)
            dropped += 1
        except OSError:
            pass
    return dropped


def _descriptors(devices: str) -> dict[int, str]:
    found: dict[int, str] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        try:
            path = os.readlink("/proc/self/fd/" + name)
        except OSError:  # the listing's own
            continue
        if path.startswith(devices):
            found[int(name)] = path
    return found


def _ranges(devices: str) -> list[tuple[int, int]]:
    """Return address and size of each mapping of these devices."""
    visible = os.fsencode(devices)
    found: list[tuple[int, int]] = []
    try:
        with open("/proc/self/maps", "rb") as maps:
            lines = maps.read().splitlines()
    except OSError:
        return found
    for line in lines:
        parts = line.split(None, 5)
        if len(parts) == 6 and parts[5].startswith(visible):
            start, _, end = parts[0].partition(b"-")
            found.append((int(start, 16), int(end, 16) - int(start, 16)))
    return found

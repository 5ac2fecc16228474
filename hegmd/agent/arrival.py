"""The script that `hegmctl attach` makes a running Python execute: it starts one thread that loads the agent, and
returns.

The text runs in the training's main thread, between two instructions of the script, followed by a call of `arrive`. So
it imports only modules that every Python has loaded, and takes microseconds: an exception that a signal handler raises
here would be lost. The thread does all slow work and all work that can fail. Raises nothing, prints nothing.

hegmctl creates the folder. The file `asked` in it is the permission: the first to rename it, this script or
hegmctl, decides. A script that runs too late, or after hegmctl has ended, removes its folder and does nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import allocate_lock, start_new_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

ASKED, TAKEN, SCRIPT, ANSWER = "asked", "taken", "script.py", "answer"
# A fork in the middle of an import would leave the child with a lock that no thread of it releases.
FORK_WAIT_S = 10.0


def arrive(folder: str, root: str, until: float, environ: Mapping[str, str], msgpack: str) -> None:
    """Load the agent whose code is below `root`, unless the caller gave up or `until` (monotonic) has passed."""
    try:
        os.rename(f"{folder}/{ASKED}", f"{folder}/{TAKEN}")
    except OSError:
        if not os.path.exists(f"{folder}/{TAKEN}"):  # hegmctl has given up
            _remove(folder)
        return
    if time.monotonic() > until:
        _remove(folder)
        return
    over = allocate_lock()
    over.acquire()

    def wait_for_it() -> None:
        if over.acquire(True, FORK_WAIT_S):
            over.release()

    os.register_at_fork(before=wait_for_it)
    start_new_thread(_work, (folder, root, environ, msgpack, over.release))


def _work(folder: str, root: str, environ: Mapping[str, str], msgpack: str, end: object) -> None:
    notes: list[tuple[str, str]]
    try:
        notes = _start_agent(root, environ, msgpack)
    except BaseException as error:  # noqa: BLE001 - the edge: nothing of this may reach the script
        notes = [("failed", f"{type(error).__name__}: {error}")]
    end()  # type: ignore[operator] # a lock's release
    try:
        with open(f"{folder}/{ANSWER}.new", "w", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{key} {' '.join(value.split())}\n" for key, value in notes)
        os.rename(f"{folder}/{ANSWER}.new", f"{folder}/{ANSWER}")
    except OSError:
        pass  # hegmctl has ended and removed the folder


def _start_agent(root: str, environ: Mapping[str, str], msgpack: str) -> list[tuple[str, str]]:
    """Start the agent. Return what to report of it, or why it did not start."""
    if "_hegm" in sys.modules:
        return [("refused", "agent")]
    torch = sys.modules.get("torch")
    if torch is None:
        return [("refused", "torch")]
    if getattr(torch.__spec__, "_initializing", False):
        return [("refused", "importing")]
    import _frozen_importlib as bootstrap
    import _frozen_importlib_external as external

    spec = external.spec_from_file_location("_hegm", f"{root}/__init__.py", submodule_search_locations=[root])
    if spec is None or spec.loader is None:
        return [("failed", f"there is no agent in {root}")]
    before = set(sys.modules)
    try:
        package = sys.modules["_hegm"] = bootstrap.module_from_spec(spec)
        spec.loader.exec_module(package)
        __import__("_hegm.agent.attached")
        notes: list[tuple[str, str]] = sys.modules["_hegm.agent.attached"].begin(environ, msgpack)
    except BaseException:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("_hegm", "_hegm_msgpack"):
                del sys.modules[name]
        raise
    return notes


def _remove(folder: str) -> None:
    try:
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)
    except OSError:
        pass

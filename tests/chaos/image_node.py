"""A private node where jobs go into images: with CRIU; what belongs to images is among its victims and left-overs.

CRIU's processes are found by their job, so that others on the same machine are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

import psutil

from hegmd.node.criu_program import Criu
from tests.chaos.image_cells import CRIU, HAND, WORKER
from tests.chaos.node import REST_LIMIT_S, Client, Node


class ImageNode(Node):
    """Two simulated GPUs, and a folder for images."""

    def __init__(self, folder: Path, criu: Criu, *, nameless: bool) -> None:
        self.criu = criu
        self.images = folder / "images"
        self.images.mkdir()
        self.locks = folder / "locks"
        self.locks.mkdir(mode=0o755)
        settings = f'[images]\ncriu = "{criu.path}"\nlock_dir = "{self.locks}"\n'
        super().__init__(folder, nameless=nameless, settings=settings)
        self._earlier_hands: list[psutil.Process] = []

    # -- who there is --------------------------------------------------------------------------------------------------

    def hands(self) -> list[psutil.Process]:
        """Return the image writers of the current daemon, and those of earlier daemons that have not exited."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.daemon.process.pid).children()
            self._earlier_hands += [child for child in children if "hegmd.images.files.child" in _words_of(child)]
        self._earlier_hands = list({hand.pid: hand for hand in self._earlier_hands if hand.is_running()}.values())
        return list(self._earlier_hands)

    def attendants(self, root: int) -> list[psutil.Process]:
        """Return the parents of that job after a restore, also during one."""
        return [process for process in psutil.process_iter() if _is_attendant_of(_words_of(process), root)]

    def at_work(self, root: int) -> list[psutil.Process]:
        """Every CRIU that dumps that job or restores it."""
        return [*self._dumping(root), *self._restoring(root)]

    def under_way(self, root: int) -> list[psutil.Process]:
        """The processes of a restore of that job that no operation has, and those that hold its image."""
        return [*self.at_work(root), *self.attendants(root), *self.hands()]

    def _dumping(self, root: int) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            words = _words_of(process)
            at = words.index("dump") if "dump" in words else -1  # CRIU may be run by its own loader
            if at > 0 and words[at + 1 : at + 3] == ["--tree", str(root)] and "criu/parent.py" not in "".join(words):
                yield process

    def _restoring(self, root: int) -> Iterator[psutil.Process]:
        for attendant in self.attendants(root):
            with suppress(psutil.NoSuchProcess):
                yield from (child for child in attendant.children() if _is_criu_that_restores(_words_of(child)))

    def await_criu(self, root: int, client: Client) -> list[psutil.Process]:
        """Wait until a CRIU works on that job; return none if it ended before the check."""
        return _awaited(lambda: self.at_work(root), client)

    # -- killing, and what is left -------------------------------------------------------------------------------------

    def strike(self, victim: str, client: Client, pid: int) -> int:
        self.hands()  # after a kill of the daemon no process owns them
        if victim == CRIU:
            return _killed(self.await_criu(pid, client))
        if victim == HAND:
            return _killed(_awaited(self.hands, client))
        if victim == WORKER:
            return _killed([psutil.Process(pid)])
        return super().strike(victim, client, pid)

    def left_of(self, root: int, *, alive: bool) -> list[str]:
        """Return remains besides those of any node: what belongs to no live job and to no image."""
        folders = [self.state_dir / "images", self.state_dir / "reviving", self.folder / "aside"]
        if alive:
            folders.append(self.locks)
        files = [str(path) for folder in folders if folder.exists() for path in folder.iterdir()]
        files += [str(path) for path in self.images.glob(".*")]
        processes = [*self.hands(), *self.at_work(root), *self.attendants(root)[1 if alive else 0 :]]
        return [
            *super().left(),
            *files,
            *(f"process {process.pid}: {' '.join(_words_of(process))}" for process in processes),
        ]


def _awaited(look: Callable[[], list[psutil.Process]], client: Client) -> list[psutil.Process]:
    """The processes that the check finds, once it finds one; none if the client ends before."""
    until = monotonic() + REST_LIMIT_S
    while not (found := look()):
        if client.process.poll() is not None:
            return []
        assert monotonic() < until, "nobody comes who is to be killed"
    return found


def _is_criu_that_restores(words: Sequence[str]) -> bool:
    return "restore" in words and "--images-dir" in words and "criu/parent.py" not in "".join(words)


def _killed(processes: Sequence[psutil.Process]) -> int:
    struck = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
            struck += 1
    return struck


def _is_attendant_of(words: Sequence[str], root: int) -> bool:
    at = words.index("tend") if "tend" in words else 0
    return at > 0 and words[at - 1].endswith("/criu/parent.py") and words[at + 2 : at + 3] == [str(root)]


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []

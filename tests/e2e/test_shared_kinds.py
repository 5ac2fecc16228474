"""Ten kinds of training through turns and make-room, whole and with their contexts kept: no loss differs.

Two of a kind share a simulated GPU that has room for one. All are `wide`:
`pytest -m wide tests/e2e/test_shared_kinds.py` runs them all.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hegmctl.connection import Connection, connect
from hegmd.protocol.sharing import RUNNING, SUSPENDED
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import BARE, SCRIPTS, MovedJob, environment
from tests.e2e.references import output_of
from tests.needs import need_packages, need_torch
from tests.wide import telling

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded_frameworks"), pytest.mark.xdist_group("frameworks")]
need_torch()

GIB, MIB = 1 << 30, 1 << 20
# How fast a job is read while something is waited for: it makes a step for each line.
PACE_MS = 20
LOOPS = ("plain", "lstm", "uneven", "amp", "accumulation", "workers", "generator")
#: The script and the requirements of the other kinds.
SCRIPTED = {"hf_trainer": ("transformers", "accelerate"), "lightning_fit": ("lightning",), "progress": ("tqdm",)}
METHODS = ("auto", "keep-context")
TABLE = [(kind, method) for kind in (*LOOPS, *SCRIPTED) for method in METHODS]


def words_of(kind: str, stop: Path) -> list[str]:
    """The command of a training of that kind."""
    if kind in SCRIPTED:
        return [sys.executable, str(SCRIPTS / f"{kind}.py")]
    return [sys.executable, str(SCRIPTS / "kinds.py"), kind, str(stop)]


class SharingJob(MovedJob):
    """One of two jobs that share a GPU."""

    def read_along(self) -> None:
        """Let it make a step, and wait a little."""
        self._read_on(PACE_MS)


class BareSharingJob(SharingJob):
    """A job that needs nothing of PyTorch's compiler."""

    more = BARE


def _step_lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("step"))


def _states(hegmd: Connection) -> dict[str, str]:
    return {job.job: job.state for job in hegmd.queue().jobs}


def _kinds(hegmd: Connection) -> list[str]:
    return [event.kind for event in hegmd.events(kinds=["sharing"])]


@pytest.mark.parametrize(("kind", "method"), telling(TABLE, []))
def test_no_loss_differs_through_turns_and_make_room(kind: str, method: str, tmp_path: Path) -> None:
    need_packages(*SCRIPTED.get(kind, ()))
    settings = f'[sharing]\nslices = "on"\nmin_quantum_s = 0.2\nmethod = "{method}"\n'
    folders = [tmp_path / name for name in ("alone", "one", "other")]
    for folder in folders:
        folder.mkdir()
    stop, words = tmp_path / "stop", words_of(kind, tmp_path / "stop")
    job_kind: Any = SharingJob if kind in ("hf_trainer", "lightning_fit") else BareSharingJob
    node = RunningDaemon(tmp_path, "--simulate", "1x1GiB").configured(settings)
    with node as daemon, job_kind(words, daemon, folders[1]) as one, connect(str(daemon.socket_path)) as hegmd:
        one.read_steps(2)
        pids = list(one.places(1))
        one.answer("suspend", str(pids[0]), "--dry-run")  # it is counted at a boundary
        size_bytes = sum(use.vram_bytes or 0 for process in hegmd.processes().processes for use in process.gpus)
        # A lease without a process would count memory of processes that start later.
        ends = ("--for", str(daemon.process.pid))
        # Another process has all but 1.4 times its memory, and then all of it, so that it leaves.
        rest_bytes = GIB - size_bytes * 7 // 5
        made = one.answer("make-room", "--gpu", "gpu0", "--bytes", str(rest_bytes), "--wait", *ends)
        assert made["lease"]["state"] == "held"
        room = one.answer("make-room", "--gpu", "gpu0", "--bytes", str(size_bytes), "--wait", *ends)
        (first,) = _states(hegmd)
        assert _states(hegmd) == {first: SUSPENDED}
        with job_kind(words, daemon, folders[2]) as other:
            other.read_steps(2)
            its = other.places(1)
            other.answer("suspend", str(next(iter(its))), "--dry-run")  # it had no gradients yet when it was counted
            hegmd.release(room["lease"]["id"])
            while _kinds(hegmd).count("sharing.resumed") < 3:
                assert _states(hegmd), "both have ended"
                one.read_along()
                other.read_along()
            (second,) = _states(hegmd).keys() - {first}
            stop.touch()
            hegmd.priority(first, "production")
            printed = [_step_lines("\n".join(one.steps())), _step_lines("\n".join(other.steps()))]
        assert second
        assert RUNNING not in _states(hegmd).values()
        assert "sharing.failed" not in _kinds(hegmd)
    stop.unlink()
    alone = _step_lines(output_of(words[1:], environment(None), folders[0]))
    for steps in printed:
        assert len(steps) > 10
        assert set(steps) <= set(alone)
        if kind not in LOOPS:  # the others end on command
            assert steps == alone

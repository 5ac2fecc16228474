"""Ranks of `run --ranks` and of torchrun share a simulated GPU by turns: all of a job or none, and no loss differs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hegmctl.connection import Connection, connect
from hegmd.protocol.sharing import RUNNING
from tests.e2e.agented import SCRIPTS as TRAINING
from tests.e2e.agented import undisturbed
from tests.e2e.daemon import RunningDaemon
from tests.e2e.forked import TORCHRUN, started
from tests.e2e.moved_job import BARE, SCRIPTS, environment
from tests.e2e.references import TWO_RANKS
from tests.looks import COMMAND_MS, pause
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded"), pytest.mark.xdist_group("ranks")]
need_torch()

MIB = 1 << 20
GPU_BYTES = 16 * MIB
BLOCK, RANKS = str(SCRIPTS / "block_ranks.py"), str(TRAINING / "ranks.py")
PACE = ("60", "gloo", "64", "0.02")
FORKED = (*TORCHRUN, "2")
STARTED = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@contextmanager
def _job(
    daemon: RunningDaemon, folder: Path, options: tuple[str, ...], *words: str, gpu: str = "gpu0"
) -> Iterator[Path]:
    """A job of two ranks; the file with what they print."""
    argv = [sys.executable, "-m", "hegmctl", "run", *options, "--gpu", gpu, "--", sys.executable, *words]
    out, environ = folder / "out", {**environment(daemon.socket_path), **BARE}
    with out.open("w") as output, (folder / "errors").open("w") as errors:
        job = started(argv, env=environ, stdout=output, stderr=errors, cwd=folder)
        try:
            yield out
        finally:
            job.terminate()
            job.wait()


def test_two_jobs_of_two_ranks_take_turns_and_no_loss_differs(tmp_path: Path) -> None:
    settings = '[sharing]\nslices = "on"\nmin_quantum_s = 0.2\n'
    one_folder, other_folder, losses = tmp_path / "one", tmp_path / "other", tmp_path / "other" / "losses"
    for folder in (one_folder, other_folder):
        folder.mkdir()
    node = RunningDaemon(tmp_path, "--simulate", f"1x{GPU_BYTES // MIB}MiB").configured(settings)
    block = _job(node, one_folder, ("--ranks", "2"), BLOCK, "100000", *PACE)
    torchrun = _job(node, other_folder, (), *FORKED, RANKS, str(losses))
    with node, connect(str(node.socket_path)) as hegmd, block as out, torchrun:
        _until(lambda: len(_steps(out)) > 3 and len(_on_gpu(hegmd)) == 4 and _least(losses) > 3)
        hegmd.suspend(list(_on_gpu(hegmd)), dry_run=True)  # they are counted with their gradients
        held = _on_gpu(hegmd)
        most_bytes = max(sum(held.values()) * 6 // 10, *(2 * size_bytes * 11 // 10 for size_bytes in held.values()))
        # A lease has the rest, so that the GPU has room for one of the two jobs, which are not children of the daemon.
        lease = hegmd.make_room(GPU_BYTES - most_bytes, pid=node.process.pid, until_free=True).lease
        assert lease is not None
        while _count(hegmd, "sharing.resumed") < 4:
            assert len(_on_gpu(hegmd)) <= 4
            pause(COMMAND_MS)
        kinds = {(op.kind, len(op.processes)) for op in hegmd.operations().operations}
        assert {ranks for _, ranks in kinds} == {2}, "all ranks of a job or none"
        assert _count(hegmd, "sharing.failed") == 0
        hegmd.release(lease.id)
        _until(lambda: [job.state for job in hegmd.queue().jobs] == [RUNNING, RUNNING])
        before = len(_steps(out)), _least(losses)
        _until(lambda: len(_steps(out)) > before[0] + 4 and _least(losses) > before[1] + 4)
    made = _steps(out)
    _compare_block(tmp_path, made)
    _compare_torchrun(tmp_path, losses)


def test_each_rank_gets_a_gpu_of_its_own_and_two_such_jobs_take_turns_on_all_gpus(tmp_path: Path) -> None:
    settings = '[sharing]\nslices = "on"\nmin_quantum_s = 0.2\n'
    one_folder, other_folder, losses = tmp_path / "one", tmp_path / "other", tmp_path / "other" / "losses"
    for folder in (one_folder, other_folder):
        folder.mkdir()
    node = RunningDaemon(tmp_path, "--simulate", f"2x{GPU_BYTES // MIB}MiB").configured(settings)
    size = ("--bytes", f"{GPU_BYTES // MIB - 4}MiB")
    block = _job(node, one_folder, ("--ranks", "2", *size), BLOCK, "100000", *PACE, gpu="auto")
    torchrun = _job(node, other_folder, size, *STARTED, RANKS, str(losses), gpu="auto:2")
    with node, connect(str(node.socket_path)) as hegmd, block as out:
        _until(lambda: len(_steps(out)) > 3 and len(_on_gpu(hegmd)) == 2)
        places = {gpu.gpu for process in hegmd.processes().processes for gpu in process.gpus}
        assert places == {"gpu0", "gpu1"}, "both ranks were on one GPU"
        with torchrun:
            while _count(hegmd, "sharing.resumed") < 2:
                assert len(_on_gpu(hegmd)) <= 2, "all ranks of a job or none"
                pause(COMMAND_MS)
            assert _count(hegmd, "sharing.failed") == 0
            before = _least(losses)
            _until(lambda: _least(losses) > before + 4)
        made = _steps(out)
    _compare_block(tmp_path, made)
    _compare_torchrun(tmp_path, losses)


def _compare_torchrun(folder: Path, losses: Path) -> None:
    """See that an undisturbed run has the same losses."""
    alone = str(folder / "alone")
    undisturbed([*TWO_RANKS, RANKS, alone, str(_least(losses))])
    for rank in "01":
        lines = Path(f"{losses}.{rank}").read_text().splitlines()[: _least(losses)]
        assert lines == Path(f"{alone}.{rank}").read_text().splitlines()


def _compare_block(folder: Path, made: set[tuple[str, ...]]) -> None:
    """See that an undisturbed run has the same losses."""
    steps = str(max(int(step) for _, step, _ in made) + 1)
    (folder / "undisturbed").mkdir()
    with RunningDaemon(folder / "undisturbed") as daemon:
        words = [sys.executable, "-m", "hegmctl", "run", "--ranks", "2", "--", sys.executable, BLOCK, steps, "60"]
        alone = started(words, env={**environment(daemon.socket_path), **BARE}, stdout=subprocess.PIPE)
        expected, _ = alone.communicate(timeout=HANG_S)
        assert alone.returncode == 0
    assert made <= {tuple(line.split()) for line in expected.splitlines()}


def _steps(out: Path) -> set[tuple[str, ...]]:
    """Rank, step and loss, of the whole lines."""
    return {tuple(line.split()) for line in out.read_text().splitlines(keepends=True) if line.endswith("\n")}


def _least(losses: Path) -> int:
    files = [Path(f"{losses}.{rank}") for rank in "01"]
    return min(file.read_text().count("\n") if file.exists() else 0 for file in files)


def _on_gpu(hegmd: Connection) -> dict[int, int]:
    """Return the GPU memory of each process that has some."""
    found = {process.pid: sum(use.vram_bytes or 0 for use in process.gpus) for process in hegmd.processes().processes}
    return {pid: size_bytes for pid, size_bytes in found.items() if size_bytes}


def _count(hegmd: Connection, kind: str) -> int:
    return sum(event.kind == kind for event in hegmd.events(kinds=["sharing"]))


def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        pause(COMMAND_MS)

"""Kills while a job of two ranks goes into images and comes out of them: what has to be true after each of ranks.

As of one training (`image_campaign`). A job whose rank or launcher was killed ends or is ended here, and is restored if
it has a complete image. A restore that was cut leaves its image whole, and the next one succeeds.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic

from hegmd.errors import HegmError
from hegmd.protocol.operations import Operation
from tests.chaos.image_campaign import ImageCampaign
from tests.chaos.image_cells import RESTORE, WORKER, ImageCell
from tests.chaos.node import REST_LIMIT_S, Client
from tests.chaos.rank_cells import LAUNCHER, RANK
from tests.chaos.ranked_job import HandedRanks
from tests.e2e.handed_job import ImageJob
from tests.looks import pause


class RankImageCampaign(ImageCampaign):
    """Plays cells with one job of two ranks at a time, on one node."""

    def _start(self, folder: Path, socket_path: Path | None) -> HandedRanks:
        return HandedRanks(folder, socket_path)

    def _hit(self, cell: ImageCell, client: Client, job: ImageJob) -> int:
        if cell.victim == RANK:
            return self._node.strike(WORKER, client, job.workers[-1])
        if cell.victim == LAUNCHER:
            return self._node.strike(WORKER, client, job.pid)
        return super()._hit(cell, client, job)

    def _see(self, cell: ImageCell, job: ImageJob, op: Operation | None) -> str:
        if not cell.may_end_the_job:
            return super()._see(cell, job, op)
        assert isinstance(job, HandedRanks)
        assert op is None or op.phase in cell.ends, f"it ended {op.phase}"
        assert op is not None or cell.state == "planned", "there is no operation"
        if cell.victim == LAUNCHER:
            self._end_without_launcher(job)
        self._await_gone()
        whole = self._is_whole()
        self.tally.whole += whole
        assert whole or cell.command != RESTORE, "a restore has changed its image"
        return self._go_on(cell, job, alive=False) if whole else self._lose(job)

    def _end_without_launcher(self, job: HandedRanks) -> None:
        """Have the ranks train to their end; or kill them, if they are held because they cannot meet again."""
        with suppress(HegmError), self._node.connection() as hegmd:
            for pid in [one.pid for one in job.living()][:1]:
                hegmd.resume(pid)
        held = [op for op in self._node.rest().values() if op.phase == "suspended"]
        if held:
            assert all(op.failure is not None and op.failure.hint for op in held), held
            for process in job.living():
                process.kill()
        job.tell_to_end()
        until = monotonic() + REST_LIMIT_S
        while job.living():
            assert monotonic() < until, f"ranks {job.living()} do not end without their launcher"
            pause()
        job.stop_file.unlink()

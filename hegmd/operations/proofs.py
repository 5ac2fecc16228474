"""The combinations that `hegmctl doctor --nccl` has tried, in a file of the state directory.

Owns that file. Runs nothing: the throwaway job is the client's. A file that cannot be read counts as empty, because
every verdict in it can be found out again.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from hegmd.errors import NOT_FOUND, UNAVAILABLE, HegmError
from hegmd.migration.plan.communicator_rules import combination_of
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.operations.survey import May, PlanSurvey
from hegmd.protocol.proofs import UNPROVEN, Combination, Proof
from hegmd.protocol.record import BadValue
from hegmd.system.state_dir import replace_file

logger = logging.getLogger(__name__)

_NAME = "nccl-proofs.json"
_MAX_PROOFS = 100


class Proofs:
    """The verdicts, the newest last. Read once, written whole."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._proofs: tuple[Proof, ...] | None = None
        # The start time of a rank and the combination that its job tries, by pid.
        self._proving: dict[int, tuple[int | None, Combination]] = {}

    def all(self) -> tuple[Proof, ...]:
        if self._proofs is None:
            self._proofs = self._read()
        return self._proofs

    def keep(self, proof: Proof) -> Proof:
        """Keep that verdict in place of an earlier one on the same combination. Raises HegmError if the disk fails."""
        others = [known for known in self.all() if known.combination != proof.combination]
        kept = [*others, *([] if proof.verdict == UNPROVEN else [proof.replace(proved_utc=time.time())])]
        if len(kept) != len(others) or len(others) != len(self.all()):
            self._write(tuple(kept[-_MAX_PROOFS:]))
        self._proving = {pid: tried for pid, tried in self._proving.items() if tried[1] != proof.combination}
        return kept[-1] if kept and kept[-1].combination == proof.combination else proof

    def let_prove(self, pid: int, combination: Combination) -> None:
        """Ignore a failed verdict for that rank's job until there is a new verdict or the rank has ended."""
        self._proving[pid] = start_ticks_of(pid), combination

    def proving(self) -> tuple[int, ...]:
        """The ranks whose jobs try their combination now."""
        is_alive = {
            pid: start is not None and start_ticks_of(pid) == start for pid, (start, _) in self._proving.items()
        }
        self._proving = {pid: tried for pid, tried in self._proving.items() if is_alive[pid]}
        return tuple(self._proving)

    def _read(self) -> tuple[Proof, ...]:
        try:
            entries = json.loads(self._path.read_text())
            return tuple(Proof.from_plain(entry, "proof") for entry in entries)
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, TypeError, BadValue) as error:
            logger.warning("%s cannot be read: %s; combinations with NCCL count as not proven", self._path, error)
            return ()

    def _write(self, proofs: tuple[Proof, ...]) -> None:
        text = json.dumps([proof.to_plain() for proof in proofs], indent=1) + "\n"
        try:
            replace_file(self._path, text.encode())
        except OSError as error:
            message = f"{self._path} cannot be written: {error.strerror or error}"
            raise HegmError(UNAVAILABLE, message, f"free space on the disk of {self._path.parent}") from error
        self._proofs = proofs


class ProofRequests:
    """The requests of clients while they try a combination."""

    def __init__(self, survey: PlanSurvey, proofs: Proofs) -> None:
        self._survey = survey
        self._proofs = proofs

    async def begin(self, pid: int, may: May) -> Proof:
        """Return the combination of that rank's job, which may be moved now. Raises NOT_FOUND for a pid that is no
        rank.

        An earlier verdict stays on disk until there is a new one: an interrupted trial allows no real job.
        """
        snapshot = await self._survey.snapshot([pid], may=may)
        named = next((candidate for candidate in snapshot.candidates if candidate.pid == pid), None)
        members = [] if named is None else [one for one in snapshot.candidates if one.job == named.job]
        combination = combination_of(snapshot, members)
        if combination is None:
            raise HegmError(NOT_FOUND, f"process {pid} is no rank with communicators on a GPU", "run: hegmctl ps")
        self._proofs.let_prove(pid, combination)
        return Proof(combination=combination, verdict=UNPROVEN)

    def end(self, proof: Proof) -> Proof:
        """Keep the verdict. Raises HegmError if the disk fails."""
        return self._proofs.keep(proof)

"""The file of tried combinations: what is kept, what takes the place of what, and a file that cannot be read."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.operations.proofs import Proofs
from hegmd.protocol.proofs import FAILED, PROVEN, UNPROVEN, Combination, Proof

TRIED = Combination(driver="580.1", library="2.29.7", framework_version="2.13.0", chip="sm90", links="nvlink")


def proof(verdict: str, **values: str) -> Proof:
    return Proof(combination=TRIED.replace(**values), verdict=verdict)


def test_a_verdict_outlives_the_daemon_and_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    first = Proofs(tmp_path)
    assert first.all() == ()
    first.keep(proof(FAILED))
    first.keep(proof(PROVEN, driver="590.1"))
    kept = first.keep(proof(PROVEN))
    assert kept.proved_utc is not None
    again = Proofs(tmp_path).all()
    assert [(one.combination.driver, one.verdict) for one in again] == [("590.1", PROVEN), ("580.1", PROVEN)]


def test_a_failed_verdict_stays_while_a_job_tries_the_combination_once_more(tmp_path: Path) -> None:
    """An interrupted trial would allow all jobs what has failed. Only the trial's own job is moved meanwhile."""
    proofs = Proofs(tmp_path)
    proofs.keep(proof(FAILED))
    proofs.let_prove(os.getpid(), TRIED)
    assert [one.verdict for one in Proofs(tmp_path).all()] == [FAILED]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as rank:
        proofs.let_prove(rank.pid, TRIED)
        assert proofs.proving() == (os.getpid(), rank.pid)
    assert proofs.proving() == (os.getpid(),), "the rank has ended"
    proofs.keep(proof(FAILED))
    assert proofs.proving() == ()


def test_a_verdict_of_unproven_forgets_the_one_before(tmp_path: Path) -> None:
    proofs = Proofs(tmp_path)
    proofs.keep(proof(FAILED))
    assert proofs.keep(proof(UNPROVEN)).verdict == UNPROVEN
    assert Proofs(tmp_path).all() == ()


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"verdict": "proven"}]', "\x00"])
def test_a_damaged_file_counts_as_empty_and_is_rewritten(tmp_path: Path, text: str) -> None:
    (tmp_path / "nccl-proofs.json").write_text(text)
    proofs = Proofs(tmp_path)
    assert proofs.all() == ()
    proofs.keep(proof(PROVEN))
    assert len(Proofs(tmp_path).all()) == 1


def test_a_verdict_that_cannot_be_written_is_not_believed(tmp_path: Path) -> None:
    proofs = Proofs(tmp_path / "missing")
    with pytest.raises(HegmError, match="cannot be written"):
        proofs.keep(proof(PROVEN))
    assert proofs.all() == ()


@pytest.mark.thorough
def test_no_more_than_a_hundred_are_kept(tmp_path: Path) -> None:
    proofs = Proofs(tmp_path)
    for number in range(105):
        proofs.keep(proof(PROVEN, driver=str(number)))
    assert [one.combination.driver for one in proofs.all()] == [str(number) for number in range(5, 105)]

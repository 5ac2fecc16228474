"""RECOVERY.md matches the machine, and no row of it loses anything."""

from __future__ import annotations

import pytest

from hegmd.migration.machine.machine import PHASES
from tests.cells import in_one_test
from tools.docs import recovery
from tools.docs.recovery import FINDINGS, Finding, Play, outcome, situations

SITUATIONS = dict(situations())
SEEN = [finding for finding in FINDINGS if finding.world is not None]
POSSIBLE = [(name, finding) for name, play in SITUATIONS.items() for finding in SEEN if finding.can_be(play)]
IN_IMAGE = "`done`: it is in a complete image, and has ended"


@pytest.mark.thorough
def test_the_page_is_fresh() -> None:
    assert recovery.PAGE.read_text() == recovery.page(), "RECOVERY.md is stale: run `make docs`"


def test_every_phase_that_lasts_is_among_the_situations() -> None:
    named = {name.rpartition(", ")[2] for name in SITUATIONS}
    assert named == set(PHASES) - {"settling", "counting", "done", "rolled-back", "lost"}


@in_one_test("name", SITUATIONS)
def test_every_situation_was_reached_by_the_machine(name: str) -> None:
    assert SITUATIONS[name].op.phase == name.rpartition(", ")[2]


@pytest.mark.thorough
@in_one_test(("name", "finding"), POSSIBLE, ids=lambda one: getattr(one, "words", one))
def test_every_finding_ends_in_a_resting_state_and_loses_no_living_job(name: str, finding: Finding) -> None:
    effects, end = outcome(SITUATIONS[name], finding)
    assert end.partition(":")[0] in {"`done`", "`rolled-back`", "`suspended`"}
    assert end != IN_IMAGE or name.startswith("checkpoint,")
    if "planned" not in name and end != IN_IMAGE and "`suspended`" not in end:
        assert "it trains on the" in end
    if "stands" in end:
        assert "`suspended`" in end
    assert "release" not in effects.split(", ") or "trains" in end


@in_one_test(("name", "finding"), [(n, f) for n, f in POSSIBLE if f.world and f.world.out], ids=str)
def test_found_bytes_are_kept_until_the_job_passes_a_boundary(name: str, finding: Finding) -> None:
    """Issue 4: an operation that had not taken them itself gave the memory back as soon as they were in the process."""
    effects, end = outcome(SITUATIONS[name], finding)
    order = effects.split(", ")
    if "release-pool" in order and end != IN_IMAGE:
        assert "verify" in order[: order.index("release-pool")]


def test_a_process_ends_only_when_its_image_was_found_whole_or_has_been_made() -> None:
    image = next(finding for finding in FINDINGS if finding.world and finding.world.image)
    bare = next(finding for finding in FINDINGS if finding.words == "it is parked on no GPU, its bytes offloaded")
    handing = SITUATIONS["checkpoint, handing"]
    assert outcome(handing, image) == ("dump, end, release-reservation, release-pool", IN_IMAGE)
    effects, end = outcome(handing, bare)
    assert "end" not in effects.split(", ")
    assert end == "`rolled-back`: it trains on the old GPU"


def test_the_page_changes_with_the_machine() -> None:
    play = SITUATIONS["suspend, suspended"]
    gone = next(finding for finding in FINDINGS if finding.event == "worker-exited")
    assert outcome(play, gone) == ("release-pool", "`lost`: it ended while its bytes were offloaded")
    untouched = Play(
        play.op.with_worker(play.op.workers[0].replace(was_offloaded=False, offloaded=False)), play.world, [], []
    )
    assert "rolled-back" in outcome(untouched, gone)[1]

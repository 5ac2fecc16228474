"""Jobs train while everything around them is killed: each state of a command once. `make test-chaos` is all of it.

A drain goes through the states of a migration, and so do a suspension and a resumption together.

tests/chaos/campaign.py has the checks after each kill and at the end.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.chaos.campaign import Campaign, trainings
from tests.chaos.cells import (
    CLIENT,
    DAEMON,
    FAULTS,
    HELPER,
    MIGRATE,
    RESUME,
    STATES,
    SUSPEND,
    VICTIMS,
    every_cell,
    few_cells,
)
from tests.chaos.gpu_node import GpuNode
from tests.chaos.image_campaign import ImageCampaign
from tests.chaos.image_cells import STATES as IMAGE_STATES
from tests.chaos.image_cells import TELLING as TELLING_OF_IMAGES
from tests.chaos.image_cells import VICTIMS as OF_IMAGES
from tests.chaos.image_cells import every_image_cell, few_image_cells
from tests.chaos.image_node import ImageNode
from tests.chaos.node import Node
from tests.chaos.rank_campaign import RankCampaign
from tests.chaos.rank_cells import IMAGE_STATES as RANK_IMAGE_STATES
from tests.chaos.rank_cells import IMAGE_VICTIMS as OF_RANK_IMAGES
from tests.chaos.rank_cells import STATES as RANK_STATES
from tests.chaos.rank_cells import TELLING as TELLING_OF_RANKS
from tests.chaos.rank_cells import TELLING_OF_IMAGES as TELLING_OF_RANK_IMAGES
from tests.chaos.rank_cells import VICTIMS as OF_RANKS
from tests.chaos.rank_cells import every_rank_cell, every_rank_image_cell
from tests.chaos.rank_image_campaign import RankImageCampaign
from tests.chaos.restart_campaign import RestartCampaign
from tests.chaos.restart_cells import TELLING as TELLING_OF_RESTARTS
from tests.chaos.restart_cells import VICTIMS as OF_RESTARTS
from tests.chaos.restart_cells import every_restart_cell, few_restart_cells
from tests.chaos.restarted_job import RestartedJob
from tests.e2e.real_criu import criu_or_skip
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
SEED = 16
need_torch()


@pytest.mark.xdist_group("memory of the node")
def test_no_kill_at_any_state_changes_a_number_or_leaves_anything(socket_dir: Path) -> None:
    with Node(socket_dir, nameless=True) as node:
        tally = Campaign(node, trainings(node, with_torch=1, by_hand=1), say=print).run(
            few_cells(VICTIMS, (MIGRATE, SUSPEND, RESUME))
        )
        missing = {state for states in STATES.values() for state in states} - node.halts.reached
    assert tally.kills.total() > 17, tally
    assert not missing


def test_no_broken_connection_or_stopped_worker_does_either(socket_dir: Path) -> None:
    with Node(socket_dir, nameless=False) as node:
        tally = Campaign(node, trainings(node, with_torch=1, by_hand=0), say=print).run(
            few_cells(FAULTS, (SUSPEND, RESUME))
        )
    assert tally.kills.total() > 11, tally


@pytest.mark.wide
def test_no_kill_of_the_gpu_helper_does_either(socket_dir: Path) -> None:
    """CUDA programs behind the stub driver, with an agent and without; moves from one GPU to the other are for
    `make test-chaos`. test_carriers.py and test_driver.py kill it within single calls, and are in `make test`."""
    with GpuNode(socket_dir, nameless=False) as node:
        cells = few_cells((HELPER,), (SUSPEND, RESUME))
        tally = Campaign(node, node.programs(with_agent=1, without=1), say=print).run(cells)
    assert tally.kills.total() > 9, tally


def test_no_kill_during_a_restart_loses_a_training_or_has_it_run_twice(socket_dir: Path) -> None:
    """A choice of them that is always the same: each round takes Python, PyTorch and often a daemon again."""
    with Node(socket_dir, nameless=True) as node:
        tally = RestartCampaign(node, say=print).run([*few_restart_cells(SEED, 2), *TELLING_OF_RESTARTS])
    assert tally.kills.total() == 3, tally
    assert tally.kills[DAEMON] == 1, tally


@pytest.mark.wide
def test_no_kill_around_an_image_leaves_half_of_one_or_half_a_job(socket_dir: Path) -> None:
    """A choice of them that is always the same, of those that the job itself survives; but CRIU's last may end it."""
    with ImageNode(socket_dir, criu_or_skip(), nameless=False) as node:
        tally = ImageCampaign(node, say=print).run([*few_image_cells(SEED, 2), *TELLING_OF_IMAGES])
    assert tally.rounds == 5, tally
    # the others may be over before the test sees them
    assert (tally.kills[DAEMON], tally.kills[CLIENT]) == (3, 1), tally
    assert tally.ends["checkpoint rolled-back"] > 0, tally
    assert tally.ends["checkpoint done, restored"] > 0, tally
    assert tally.ended_jobs <= 1, tally


@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(10 * HANG_S)  # it waits for one thing after the other
def test_no_kill_around_ranks_changes_a_loss_or_leaves_a_rank_waiting(socket_dir: Path) -> None:
    """Issue 16, outcome 3: a choice that needs one job of ranks; the last kill ends it. `make test-chaos` is all."""
    with Node(socket_dir, nameless=True) as node:
        tally = RankCampaign(node, say=print).run(TELLING_OF_RANKS)
    assert (tally.rounds, tally.ended_jobs) == (len(TELLING_OF_RANKS), 1), tally


@pytest.mark.wide
def test_no_kill_around_an_image_of_ranks_changes_a_loss_or_leaves_half_a_job(socket_dir: Path) -> None:
    """Issue 16, outcome 3: the same of images of ranks; the ranks are killed in turn with their launcher."""
    with ImageNode(socket_dir, criu_or_skip(), nameless=True) as node:
        tally = RankImageCampaign(node, say=print).run(TELLING_OF_RANK_IMAGES)
    assert tally.kills.total() == len(TELLING_OF_RANK_IMAGES), tally
    assert tally.restored > 1, tally


def test_the_whole_run_kills_each_process_in_each_state_of_an_image_of_ranks() -> None:
    cells = list(every_rank_image_cell())
    assert len(cells) == len(set(cells)) > 400
    assert set(TELLING_OF_RANK_IMAGES) < set(cells)
    states = {(command, state) for command, states in RANK_IMAGE_STATES.items() for state in states}
    ended = {("checkpoint", "done")}  # nothing of the job is left to be killed
    for victim in OF_RANK_IMAGES:
        assert states - ended == {(cell.command, cell.state) for cell in cells if cell.victim == victim} - ended


def test_the_whole_run_kills_each_process_in_each_state_of_ranks() -> None:
    cells = list(every_rank_cell())
    assert len(cells) == len(set(cells)) > 700
    assert set(TELLING_OF_RANKS) < set(cells)
    states = {(command, state) for command, states in RANK_STATES.items() for state in states}
    for victim in OF_RANKS[:-1]:
        assert states == {(cell.command, cell.state) for cell in cells if cell.victim == victim}


def test_the_whole_run_kills_each_process_in_each_state_of_an_image() -> None:
    cells = list(every_image_cell())
    assert len(cells) == len(set(cells)) > 200
    assert set(TELLING_OF_IMAGES) < set(cells)
    states = {(command, state) for command, states in IMAGE_STATES.items() for state in states}
    assert states == {(cell.command, cell.state) for cell in cells if cell.victim == DAEMON}
    assert {cell.victim for cell in cells} == set(OF_IMAGES)


def test_the_whole_run_kills_each_process_in_each_state_of_a_restart() -> None:
    cells = list(every_restart_cell())
    assert len(cells) == len(set(cells)) > 150
    assert set(TELLING_OF_RESTARTS) < set(cells)
    assert {cell.victim for cell in few_restart_cells(SEED, len(OF_RESTARTS))} == set(OF_RESTARTS)


def test_the_whole_run_kills_at_least_two_hundred_times_and_everywhere() -> None:
    cells = list(every_cell())
    assert len(cells) > 300
    assert len({(cell.command, cell.state, cell.victim) for cell in cells}) == len(VICTIMS) * sum(
        map(len, STATES.values())
    )


class _Dying(RestartedJob):
    """A training that was killed and is listed for a while as if it lived; its supervisor has exited with it."""

    def __init__(self, folder: Path) -> None:
        self._output, self._errors, self.folder = folder / "output", folder / "errors", folder
        self._output.write_text("7 0 0x1p+0\n")
        self._errors.touch()
        self._killed, self.looks = {7}, 0
        self.supervisor = subprocess.Popen([sys.executable, "-S", "-c", ""], text=True)
        self.supervisor.wait()

    def process(self) -> psutil.Process | None:
        self.looks += 1
        return psutil.Process() if self.looks < 3 else None


def test_the_daemon_waited_for_a_dying_training_as_if_it_trained(tmp_path: Path) -> None:
    """«It made no step within 60 s», on a busy machine: whether it lives was asked once, before steps were awaited."""
    job = _Dying(tmp_path)
    assert job.await_steps_or_end(2) is None
    assert job.looks == 3

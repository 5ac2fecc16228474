"""`python -m tests.chaos`: every possible kill, with the bytes in flight held by a keeper and then by files.

First trainings that restart, and one that is dumped and restored; then, on simulated GPUs, trainings that migrate, and
two ranks that migrate together and are dumped; then CUDA programs with and without an agent, on GPUs of the stub
driver. Prints each kill with the end of its operation, and finally the figures.
`--gpus`, `--memory`, `--command`, `--victim`, `--state` and `--moment` select some.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic

from tests.chaos.campaign import Campaign, Tally, trainings
from tests.chaos.cells import (
    BOTH,
    CLIENT,
    DAEMON,
    FAULTS,
    HELPER,
    KEEPER,
    OF_THE_HELPER,
    STATES,
    VICTIMS,
    Cell,
    every_cell,
    for_both_kinds,
)
from tests.chaos.gpu_node import GpuNode
from tests.chaos.halts import MOMENTS
from tests.chaos.image_campaign import ImageCampaign, ImageTally
from tests.chaos.image_cells import STATES as IMAGE_STATES
from tests.chaos.image_cells import ImageCell, every_image_cell
from tests.chaos.image_node import ImageNode
from tests.chaos.node import Node
from tests.chaos.rank_campaign import RankCampaign
from tests.chaos.rank_cells import IMAGE_STATES as RANK_IMAGE_STATES
from tests.chaos.rank_cells import STATES as RANK_STATES
from tests.chaos.rank_cells import RankCell, RankImageCell, every_rank_cell, every_rank_image_cell
from tests.chaos.rank_image_campaign import RankImageCampaign
from tests.chaos.restart_campaign import RestartCampaign, RestartTally
from tests.chaos.restart_cells import RestartCell, every_restart_cell
from tests.e2e.real_criu import find_criu

SIMULATED, DRIVEN = "simulated", "driven"
NAMELESS, NAMED = "nameless", "named"
RESTART = "restart"
AnyCell = RestartCell | ImageCell | RankCell
#: These end daemons first, so that the others find all leftovers in one daemon. Only daemon and keeper hold the bytes
#: that a driver has copied out, so killing both at once is not a case there.
VICTIMS_OF = {
    (SIMULATED, NAMELESS): (DAEMON, BOTH, CLIENT, KEEPER),
    (SIMULATED, NAMED): (DAEMON, *FAULTS),
    (DRIVEN, NAMELESS): (DAEMON, CLIENT, KEEPER, *OF_THE_HELPER),
    (DRIVEN, NAMED): (DAEMON, HELPER),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    restarts = tuple(every_restart_cell())
    images = tuple(every_image_cell())
    ranks = tuple(every_rank_cell())
    rank_images = tuple(every_rank_image_cell())
    others: tuple[AnyCell, ...] = (*restarts, *images, *ranks, *rank_images)
    known_states = {state for states in STATES.values() for state in states} | {cell.state for cell in others}
    known_victims = dict.fromkeys((*VICTIMS, *FAULTS, *OF_THE_HELPER, *(cell.victim for cell in others)))
    parser.add_argument("--victim", choices=tuple(known_victims), action="append")
    parser.add_argument("--state", choices=sorted(known_states), action="append")
    parser.add_argument("--moment", choices=sorted({*MOMENTS, *(cell.moment for cell in others)}), action="append")
    parser.add_argument(
        "--command",
        choices=(*STATES, RESTART, *IMAGE_STATES, *RANK_STATES, *map(_of_ranks, RANK_IMAGE_STATES)),
        action="append",
    )
    parser.add_argument("--memory", choices=(NAMELESS, NAMED), action="append")
    parser.add_argument("--gpus", choices=(SIMULATED, DRIVEN), action="append")
    options = parser.parse_args()
    if RESTART in (options.command or [RESTART]) and {SIMULATED, NAMELESS} <= {
        *(options.gpus or [SIMULATED]),
        *(options.memory or [NAMELESS]),
    }:
        _play_restarts([cell for cell in restarts if _is_wanted(cell, RESTART, options)])
    for memory in (NAMED, NAMELESS):
        if SIMULATED in (options.gpus or [SIMULATED]) and memory in (options.memory or [memory]):
            _play_images(
                [cell for cell in images if _is_wanted(cell, cell.command, options)], nameless=memory == NAMELESS
            )
    if SIMULATED in (options.gpus or [SIMULATED]) and NAMELESS in (options.memory or [NAMELESS]):
        _play_ranks([cell for cell in ranks if _is_wanted(cell, cell.command, options)])
        _play_rank_images([cell for cell in rank_images if _is_wanted(cell, _of_ranks(cell.command), options)])
    for (gpus, memory), all_victims in VICTIMS_OF.items():
        victims = [victim for victim in all_victims if not options.victim or victim in options.victim]
        if gpus not in (options.gpus or [gpus]) or memory not in (options.memory or [memory]):
            continue
        cells = [cell for cell in every_cell(victims) if _is_wanted(cell, cell.command, options)]
        if cells:
            began = monotonic()
            tally = _played(cells, gpus, nameless=memory == NAMELESS)
            print(
                f"{gpus}, {memory}: {_in_all(tally, 'killed or struck', monotonic() - began)};"
                f" {tally.steps} steps, each as in an undisturbed run"
            )
    return 0


def _is_wanted(cell: Cell | AnyCell, command: str, options: argparse.Namespace) -> bool:
    """Return whether the options select the cell."""
    return (
        cell.victim in (options.victim or [cell.victim])
        and cell.state in (options.state or [cell.state])
        and cell.moment in (options.moment or [cell.moment])
        and command in (options.command or [command])
    )


def _of_ranks(command: str) -> str:
    """Return the option's name for that command with a job of ranks."""
    return f"{command} ranks"


def _in_all(tally: Tally, what_was_done: str, took_s: float) -> str:
    """Return how often each victim was hit, and how the operations ended."""
    killed = ", ".join(f"{victim} {count}" for victim, count in tally.kills.items() if count)
    ends = ", ".join(f"{end} {count}" for end, count in tally.ends.items())
    return f"{tally.rounds} rounds, {tally.kills.total()} {what_was_done} ({killed}) in {took_s:.0f} s; {ends}"


def _play_images(cells: Sequence[ImageCell], *, nameless: bool) -> None:
    _play_by_criu(ImageCampaign, cells, "images", nameless=nameless)


def _play_rank_images(cells: Sequence[RankImageCell]) -> None:
    _play_by_criu(RankImageCampaign, cells, "images of ranks", nameless=True)


def _play_by_criu(campaign: type[ImageCampaign], cells: Sequence[ImageCell], name: str, *, nameless: bool) -> None:
    criu = find_criu()
    if not cells or isinstance(criu, str):
        print(f"{name}: nothing was played: {criu if cells else 'nothing of them is asked for'}")
        return
    began = monotonic()
    with _folder() as folder:
        with ImageNode(Path(folder), criu, nameless=nameless) as node:
            tally = campaign(node, say=partial(print, flush=True)).run(cells)
        print(f"{NAMELESS if nameless else NAMED}, {name}: {image_summary(tally, monotonic() - began)}")


def image_summary(tally: ImageTally, took_s: float) -> str:
    """Return the result of a campaign of images in one line."""
    return (
        f"{_in_all(tally, 'killed', took_s)};"
        f" {tally.whole} whole images, {tally.restored} jobs brought back, {tally.ended_jobs} trainings ended;"
        f" {tally.steps} steps, each as in an undisturbed run"
    )


def _play_restarts(cells: Sequence[RestartCell]) -> None:
    began = monotonic()
    with _folder() as folder, Node(Path(folder), nameless=True) as node:
        print(summary(RestartCampaign(node, say=print).run(cells), monotonic() - began))


def _play_ranks(cells: Sequence[RankCell]) -> None:
    began = monotonic()
    if not cells:
        return
    with _folder() as folder, Node(Path(folder), nameless=True) as node:
        tally = RankCampaign(node, say=partial(print, flush=True)).run(cells)
    what = _in_all(tally, "killed or stopped", monotonic() - began)
    print(f"ranks: {what}; {tally.ended_jobs} jobs ended; {tally.steps} steps, each as in an undisturbed run")


def summary(tally: RestartTally, took_s: float) -> str:
    """Return the result of a campaign of restarts in one line."""
    return (
        f"restarts: {_in_all(tally, 'killed', took_s)};"
        f" {tally.resumed} gone on from a state that was held, {tally.ended_jobs} trainings ended; {tally.steps} steps,"
        " each as in an undisturbed run, and never by two processes at once"
    )


def _played(cells: Sequence[Cell], gpus: str, *, nameless: bool) -> Tally:
    with _folder() as folder:
        if gpus == SIMULATED:
            with Node(Path(folder), nameless=nameless) as node:
                return Campaign(node, trainings(node, with_torch=3, by_hand=1), say=print).run(cells)
        with GpuNode(Path(folder), nameless=nameless) as driven:
            around = [cell for cell in cells if cell.victim not in OF_THE_HELPER]
            within = for_both_kinds(cell for cell in cells if cell.victim in OF_THE_HELPER)
            return Campaign(driven, driven.programs(with_agent=2, without=2), say=print).run([*around, *within])


def _folder() -> tempfile.TemporaryDirectory[str]:
    """For a node; short, since sockets lie in it."""
    return tempfile.TemporaryDirectory(prefix="hegm-", dir="/tmp", ignore_cleanup_errors=True)


if __name__ == "__main__":
    sys.exit(main())

"""Lives of bytes under the carriers that have the helper copy, while parts fail permanently and others for a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hegmd.errors import Refused
from hegmd.migration.carriers.copying import CopyingCarrier
from hegmd.migration.carriers.host import HostCarrier
from hegmd.migration.carriers.peer import PeerCarrier
from hegmd.migration.contracts import MigratedProcess, Progress
from tests.simulation.carried import Make, Node, host, live, peer
from tests.wide import quick_first

SEEDS, ENOUGH = 150, 30


class WithoutFallback(PeerCarrier):
    """The helper tries again, without end, what it cannot open."""

    async def prepare_own_copies(self, subject: MigratedProcess, direction: str) -> None:
        raise Refused("the driver lets nobody else open memory of it", "ask with --carrier worker")


class SkipsAgentCopy(HostCarrier):
    """The process gets no order to copy what the helper could not."""

    async def own_copies(
        self, subject: MigratedProcess, direction: str, spans: list[tuple[int, int, int, int]], on_progress: Progress
    ) -> None:
        on_progress(sum(span[2] for span in spans))


class EmptiesWindowTooEarly(PeerCarrier):
    """The window is emptied before it was filled."""

    async def order_copy(self, *arguments: Any) -> None:
        if arguments[1] == "in":
            await super().order_copy(*arguments)


def without_fallback(node: Node) -> CopyingCarrier:
    return WithoutFallback(node.helper, node.gpus, node.memory, node.pool)  # type: ignore[arg-type]  # these are models


def forgetful(node: Node) -> CopyingCarrier:
    return SkipsAgentCopy(node.helper, node.gpus, node.pool, node.memory)  # type: ignore[arg-type]  # these are models


def overwriting(node: Node) -> CopyingCarrier:
    return EmptiesWindowTooEarly(node.helper, node.gpus, node.memory, node.pool)  # type: ignore[arg-type]  # these are models


MUTANTS: Sequence[Make] = (without_fallback, forgetful, overwriting)


@pytest.mark.parametrize("make", quick_first([peer, host], 1), ids=lambda make: make.__name__)
def test_every_byte_returns_after_any_failure(make: Make) -> None:
    """Issue 14, row 1."""
    found = {seed: wrong for seed in range(SEEDS) if (wrong := live(seed, make))}
    assert found == {}


@pytest.mark.parametrize("make", MUTANTS, ids=lambda make: make.__name__)
def test_an_injected_bug_is_found(make: Make) -> None:
    assert any(live(seed, make) for seed in range(ENOUGH))

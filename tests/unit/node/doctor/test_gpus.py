"""Health of the GPUs, and the ways from one to another."""

from __future__ import annotations

import pytest

from hegmd.node.doctor import gpus
from hegmd.node.doctor.facts import SUMMARY_CHARACTERS
from hegmd.protocol.snapshots import Gpu, Health, PeerLink
from tests.unit.node.doctor.node import FileNode, gpu


def ill(index: int, state: str, *notes: str, **changes: object) -> Gpu:
    return gpu(index, health=Health(state=state, notes=notes), **changes)


def test_without_a_gpu_there_is_nothing_to_check(node: FileNode) -> None:
    assert gpus.absent(node.facts()) == "there is no GPU on this node"
    assert gpus.absent(node.facts(gpus=(gpu(0),))) is None


def test_all_checks_pass(node: FileNode) -> None:
    found = gpus.health(node.facts(gpus=(gpu(0), gpu(1))))
    assert (found.status, found.summary) == ("ok", "2 GPUs without errors")


def test_unreported_health_does_not_count_as_good(node: FileNode) -> None:
    silent = ill(1, "unknown")
    assert gpus.health(node.facts(gpus=(silent,))).status == "skip"
    assert gpus.health(node.facts(gpus=(gpu(0), silent))).summary == "1 GPU without errors; gpu1 unknown"


@pytest.mark.parametrize(
    ("state", "words"), [("lost", "gpu1 has fallen off the bus"), ("unknown", "library does not answer")]
)
def test_a_lost_gpu_comes_first(node: FileNode, state: str, words: str) -> None:
    found = gpus.health(node.facts(gpus=(ill(0, "failed", "XID 48"), gpu(1, state=state))))
    assert found.status == "fail"
    assert words in found.summary


def test_the_worst_reason_is_shown_and_the_others_are_named(node: FileNode) -> None:
    found = gpus.health(node.facts(gpus=(ill(0, "warn", "slow"), ill(1, "failed", "XID 79", "ECC"), gpu(2))))
    assert (found.status, found.summary) == ("fail", "gpu1: XID 79 and 1 more; also gpu0")
    assert found.fix is not None
    assert "sudo nvidia-smi --gpu-reset -i 0000:02:00.0" in found.fix


def test_a_warning_shows_where_to_look(node: FileNode) -> None:
    found = gpus.health(node.facts(gpus=(ill(0, "warn", "3 rows to be remapped"),)))
    assert found.status == "warn"
    assert found.fix == "nvidia-smi -q -i 0000:01:00.0 -d ECC,PAGE_RETIREMENT,ROW_REMAPPER,PERFORMANCE"


@pytest.mark.parametrize(
    ("maker", "fix"), [("amd", "amd-smi metric --gpu 0"), ("simulated", "hegmctl simulate fault gpu0 none")]
)
def test_every_vendor_has_its_own_commands(node: FileNode, maker: str, fix: str) -> None:
    found = gpus.health(node.facts(gpus=(ill(0, "warn", "ECC", vendor=maker),)))
    assert found.fix is not None
    assert fix in found.fix


def test_long_notes_stay_on_a_line(node: FileNode) -> None:
    found = gpus.health(node.facts(gpus=(ill(0, "warn", "x" * 300),)))
    assert len(found.summary) == SUMMARY_CHARACTERS


def test_neighbours_with_links(node: FileNode) -> None:
    assert gpus.peers(node.facts(gpus=(gpu(0),))).status == "skip"
    found = gpus.peers(node.facts(gpus=(gpu(0), gpu(1))))
    assert (found.status, found.summary) == ("ok", "1 pair of GPUs has a direct link (nvlink)")


def test_pairs_without_a_link(node: FileNode) -> None:
    found = gpus.peers(node.facts(gpus=(gpu(0), gpu(1), gpu(2), gpu(3))))
    assert found.status == "warn"
    assert "gpu0 and gpu2, gpu0 and gpu3 and 1 more" in found.summary
    assert found.fix == "nvidia-smi topo -p2p r"


def test_a_link_in_one_direction_only_is_not_a_link(node: FileNode) -> None:
    found = gpus.peers(node.facts(gpus=(gpu(0), gpu(1, links=()))))
    assert found.status == "warn"


def test_gpus_of_different_chips_are_not_compared(node: FileNode) -> None:
    assert gpus.peers(node.facts(gpus=(gpu(0), gpu(1, chip="ga102", links=())))).status == "skip"


def test_three_gpus_all_linked(node: FileNode) -> None:
    def linked(index: int) -> Gpu:
        return gpu(index, links=tuple(PeerLink(to_uuid=f"GPU-{other}", kind="pcie") for other in range(3)))

    found = gpus.peers(node.facts(gpus=(linked(0), linked(1), linked(2))))
    assert found.summary == "3 pairs of GPUs have a direct link (pcie)"

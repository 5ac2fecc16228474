"""Peer and host for one process on several GPUs: a copy session for each device, which keeps the carriers' contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from hegmd.errors import Refused
from hegmd.memory.video_memory import DEVICE_BYTES
from hegmd.migration.carriers.copying import lane_of, lanes_of
from hegmd.migration.carriers.host import HostCarrier
from hegmd.migration.carriers.peer import PeerCarrier
from hegmd.migration.contracts import Carrier, MigratedProcess, OutOfMemory
from hegmd.migration.methods.gpus import pool_owner
from tests.contract.carried import IpcAgent, Rig, ignored, rigged
from tests.contract.helped import GIB, MIB, SIZE_BYTES, SIZES_MIB, Owner
from tests.kit.carriers import check_carrier
from tests.stubs.cuda.node import CudaNode

# The pieces of 3 and 1 MiB are on its first device, that of 4 MiB is on the second.
SHARES = (4 * MIB, 4 * MIB)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[CudaNode, Owner]]:
    node = CudaNode.make(tmp_path / "node", gpus=4)
    made = Owner(node, "0,1", *SIZES_MIB)
    yield node, made
    made.close()


def peer(rig: Rig) -> Carrier:
    return PeerCarrier(rig.link, rig.gpus, rig.memory, rig.pool)


def host(rig: Rig) -> Carrier:
    return HostCarrier(rig.link, rig.gpus, rig.pool, rig.memory)


Make = Callable[[Rig], Carrier]
both = pytest.mark.parametrize("make", [peer, host], ids=lambda make: make.__name__)


@asynccontextmanager
async def spread(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch, to: str = "gpu2,gpu3"
) -> AsyncIterator[tuple[Rig, IpcAgent, MigratedProcess]]:
    async with rigged(tmp_path, *owner, monkeypatch) as rig:
        agent = IpcAgent(rig.workers, rig.owner)
        agent.gpus = tuple(owner[0].uuids[:2])
        subject = await rig.subject_of(agent)
        yield rig, agent, replace(subject, gpu="gpu0,gpu1", target_gpu=to, storage_bytes_by_gpu=SHARES)


async def put_back(carrier: Carrier, subject: MigratedProcess) -> None:
    assert await carrier.reload(subject, ignored, lambda: nullcontext(lambda: False)) == SIZE_BYTES
    await carrier.release(subject)


@pytest.mark.thorough
@both
async def test_it_keeps_the_contract_also_if_the_helper_is_killed(
    tmp_path: Path, owner: tuple[CudaNode, Owner], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spread(tmp_path, owner, monkeypatch) as (rig, agent, subject):

        async def lose_the_helper(_: Carrier) -> None:
            rig.link.kill("the test says so")

        await check_carrier(
            make(rig),
            subject,
            size_bytes=SIZE_BYTES,
            too_many_bytes=64 * GIB,
            made=lambda: agent.made,
            while_out=lose_the_helper,
        )
        assert rig.owner.ask("digest") == rig.owner.digest
        assert not agent.copied


@pytest.mark.thorough
@both
async def test_storages_that_cannot_be_exported_are_copied_by_the_process(
    tmp_path: Path, owner: tuple[CudaNode, Owner], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spread(tmp_path, owner, monkeypatch) as (rig, agent, subject):
        agent.own, carrier = {1, 2}, make(rig)
        await carrier.reserve(subject, SIZE_BYTES)
        assert await carrier.offload(subject, ignored) == SIZE_BYTES
        await put_back(carrier, subject)
        assert rig.owner.ask("digest") == rig.owner.digest
        assert {way: {number for there, number in agent.copied if there == way} for way in ("out", "in")} == {
            "out": {1, 2},
            "in": {1, 2},
        }


@pytest.mark.thorough
async def test_the_memory_records_which_devices_bytes_it_has(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs are exchanged, and a daemon that knows nothing of the way out brings the bytes back, or on."""
    async with spread(tmp_path, owner, monkeypatch, "gpu1,gpu0") as (rig, _, subject):
        carrier, uuids = peer(rig), owner[0].uuids
        await carrier.reserve(subject, SIZE_BYTES)
        held = {gpu: rig.memory.pieces(pool_owner(subject), gpu)[0].at for gpu in rig.memory.of(pool_owner(subject))}
        assert held == {uuids[1]: 0, uuids[0]: DEVICE_BYTES}
        assert await carrier.offload(subject, ignored) == SIZE_BYTES
        await carrier.abandon(subject)
        back = replace(subject, gpu="gpu1,gpu0", target_gpu="gpu0,gpu1")  # an operation that counts them the other way
        await put_back(peer(rig), back)
        assert rig.owner.ask("digest") == rig.owner.digest


@pytest.mark.thorough
@both
@pytest.mark.parametrize("lacking", ["devices", "known GPUs"])
async def test_an_agent_that_does_not_report_the_gpus_of_its_storages_keeps_its_bytes(
    tmp_path: Path, owner: tuple[CudaNode, Owner], make: Make, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spread(tmp_path, owner, monkeypatch) as (rig, agent, subject):
        agent.gpus = () if lacking == "devices" else tuple(owner[0].uuids[1:3])
        carrier = make(rig)
        await carrier.reserve(subject, SIZE_BYTES)
        with pytest.raises(Refused, match="does not report which of its storages are on which of gpu0, gpu1") as error:
            await carrier.offload(subject, ignored)
        assert "--carrier worker" in error.value.hint
        assert rig.owner.ask("digest") == rig.owner.digest
        await carrier.release(subject)


@pytest.mark.thorough
async def test_devices_in_another_order_than_was_reserved_for_keep_their_bytes(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spread(tmp_path, owner, monkeypatch) as (rig, _, subject):
        carrier = peer(rig)
        await carrier.reserve(subject, SIZE_BYTES)
        with pytest.raises(Refused, match="in another order"):
            await carrier.offload(replace(subject, gpu="gpu1,gpu0"), ignored)
        assert rig.owner.ask("digest") == rig.owner.digest
        await carrier.release(subject)


@pytest.mark.thorough
async def test_a_share_that_has_grown_is_refused_by_its_gpu(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spread(tmp_path, owner, monkeypatch) as (rig, _, subject):
        carrier, small = peer(rig), replace(subject, storage_bytes_by_gpu=(6 * MIB, 2 * MIB))
        await carrier.reserve(small, SIZE_BYTES)
        with pytest.raises(Refused, match=f"{4 * MIB} bytes to offload on gpu1, but {2 * MIB} bytes are reserved"):
            await carrier.offload(small, ignored)
        assert rig.owner.ask("digest") == rig.owner.digest
        await carrier.release(subject)


@pytest.mark.thorough
async def test_without_memory_on_one_target_nothing_is_reserved_on_the_others(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spread(tmp_path, owner, monkeypatch) as (rig, _, subject):
        carrier = peer(rig)
        with pytest.raises(OutOfMemory):
            await carrier.reserve(replace(subject, storage_bytes_by_gpu=(4 * MIB, 64 * GIB)), SIZE_BYTES)
        assert carrier.held_bytes(subject) == 0


@pytest.mark.thorough
async def test_the_sessions_of_a_process_are_not_those_of_one_whose_name_begins_with_its_own(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spread(tmp_path, owner, monkeypatch) as (_, _, subject):
        own = replace(subject, name="python3")
        other = replace(subject, name="python3.11")
        lanes = [lane_of(one) for one in (own, replace(own, device=0), replace(own, device=1), other)]

        assert lanes_of(own, lanes) == lanes[:3]
        assert lanes_of(replace(own, device=1), lanes) == lanes[2:3]
        assert lanes_of(other, lanes) == lanes[3:]

"""Memory and processes without an operation: found, listed, adopted on request, and never released otherwise."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hegmd.errors import DENIED, NOT_FOUND, REFUSED, HegmError, Refused
from hegmd.gpu_helper.link import Link
from hegmd.memory.pool import Key, MemoryKeeping, Piece, Pool, Source
from hegmd.memory.pool_memory import Memory
from hegmd.memory.pool_names import PieceName
from hegmd.memory.spill_file import SpillFolder
from hegmd.memory.video_memory import DEVICE_BYTES, VideoMemory
from hegmd.migration.machine.adoption import DriverProcess, adopted
from hegmd.operations.orphaned_memory import OrphanedMemory, VideoOrphans, found_for
from hegmd.operations.orphans import ParkedOrphans, PoolOrphans
from hegmd.protocol.messages import AgentAttend
from hegmd.protocol.snapshots import AgentInfo
from hegmd.workers.workers import AgentConnection, Identity, Workers
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import MIB, Node, running

Child = subprocess.Popen[bytes]


async def suspended(state_dir: Path, pid: int, *, spill: bool = False) -> ModelAgent:
    """An agent that a daemon suspended before it lost its journal."""
    async with running(state_dir) as node:
        agent = await node.attend(pid)
        await node.operations.suspend([pid], node.context(), spill=spill)
    (state_dir / "operations.journal").unlink()
    return agent


async def back(agent: ModelAgent, node: Node) -> None:
    agent.workers = node.workers
    await agent.attend(node.tasks)


async def test_parked_agents_and_bytes_without_a_journal_are_listed_and_adopted(tmp_path: Path, process: Child) -> None:
    agent = await suspended(tmp_path, process.pid, spill=True)
    async with running(tmp_path) as node:
        await back(agent, node)
        by_kind = {orphan.kind: orphan for orphan in node.moving.orphans.all()}
        assert set(by_kind) == {"bytes", "process"}
        assert "operation 1 is not in the journal" in by_kind["bytes"].why
        assert by_kind["bytes"].pid == process.pid
        assert by_kind["process"].next == f"hegmctl adopt {process.pid}"
        assert node.events.counts["pool.orphan"] == 2
        with pytest.raises(HegmError, match="does not know on which GPU"):
            await node.operations.adopt(process.pid, None, node.context())
        assert agent.data is None
        answer = await node.operations.adopt(process.pid, "gpu1", node.context())
        assert answer.operation is not None
        assert (answer.operation.phase, answer.operation.failure) == ("done", None)
        assert (agent.data, agent.parked) == (b"weights", False)
        assert node.reservations(process.pid) == {"gpu1": 7}
        assert node.moving.orphans.all() == ()
        assert node.moving.pool.spilled_bytes == 0


@pytest.mark.thorough
async def test_an_orphan_with_its_own_descriptor_needs_no_segment(tmp_path: Path, process: Child) -> None:
    agent = await suspended(tmp_path, process.pid)
    async with running(tmp_path) as node:
        await back(agent, node)
        await node.operations.adopt(process.pid, "gpu0", node.context())
        assert agent.data == b"weights"
        assert node.moving.orphans.all() == (), "its bytes in memory are not its own any more"


async def test_a_job_is_adopted_whole(tmp_path: Path, process: Child, second_process: Child) -> None:
    async with running(tmp_path) as node:
        agents = [
            ModelAgent(node.workers, child.pid, token=4 * f"{child.pid:08d}") for child in (process, second_process)
        ]
        for agent in agents:
            agent.about, agent.parked = {"job": "train"}, True
            await agent.attend(node.tasks)
        answer = await node.operations.adopt(process.pid, "gpu0", node.context())
        assert answer.operation is not None
        assert sorted(one.pid for one in answer.operation.processes) == sorted([process.pid, second_process.pid])
        assert answer.operation.phase == "done"
        assert [agent.parked for agent in agents] == [False, False]


@pytest.mark.thorough
async def test_an_adoption_that_cannot_be_finished_leaves_a_suspended_operation(tmp_path: Path, process: Child) -> None:
    agent = await suspended(tmp_path, process.pid)
    async with running(tmp_path) as node:
        await back(agent, node)
        agent.refuses["reload"] = "no memory for it"
        answer = await node.operations.adopt(process.pid, "gpu0", node.context())
        assert answer.operation is not None
        assert answer.operation.phase == "suspended"
        agent.refuses.clear()
        await node.operations.resume(process.pid, "gpu1", node.context())
        assert agent.data == b"weights"


@pytest.mark.parametrize("how", ["nobody", "training", "taken", "stranger", "elsewhere"])
async def test_a_process_with_an_owner_is_not_adopted(tmp_path: Path, process: Child, how: str) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        pid, to, may, code = process.pid, "gpu0", True, REFUSED
        if how == "nobody":
            pid, code = 1, NOT_FOUND
        if how == "stranger":
            may, code = False, DENIED
        if how == "elsewhere":
            agent.parked, to, code = True, "gpu9", NOT_FOUND
        if how == "taken":
            await node.operations.suspend([process.pid], node.context())
        with pytest.raises(HegmError) as refused:
            await node.operations.adopt(pid, to, node.context(may=may))
        assert refused.value.code is code or how == "taken"
        assert "1" not in [op.id for op in node.operations.runner.operations()] or how == "taken"


def standing(source: Source, held_bytes: int, *, mark: str | None = "", entrusted: bool = True) -> AgentConnection:
    about = AgentAttend(
        token="a" * 32,
        python_version="3.11",
        boundary=1,
        parked=True,
        held_bytes=held_bytes,
        mark=mark,
        entrusted=entrusted,
    )
    return AgentConnection(Identity(4711, source.start_ticks, source.uid), AgentInfo(name="agent", version="1"), about)


def pool_of(*pieces: Piece) -> Pool:
    pool = Pool(64 * MIB, keep=MemoryKeeping())
    pool.enter(pieces, lambda _: False)
    return pool


async def test_bytes_of_a_process_were_given_to_another_users_of_the_same_pid() -> None:
    mine, size_bytes = Source(1000, 500), 4096
    names = [
        PieceName(Key("7", "4711"), size_bytes, "ab", mine),
        PieceName(Key("8", "4711"), size_bytes, "cd", Source(1001, 500)),
        PieceName(Key("9", "4711"), size_bytes, "ef", Source(1000, 501)),
        PieceName(Key("10", "4711"), size_bytes, "0a"),  # from a release that did not record the owner
    ]
    pool = pool_of(*[Piece(name, size_bytes, spilled=True) for name in names])
    assert await found_for(pool, standing(mine, size_bytes), "4711") == str(names[0])
    assert await found_for(pool, standing(Source(1002, 500), size_bytes), "4711") is None
    assert await found_for(pool, standing(mine, size_bytes), "4712") is None
    assert await found_for(pool, standing(mine, size_bytes + 1), "4711") is None


async def test_the_newest_of_several_segments_was_used_whatever_its_content() -> None:
    mine, size_bytes, mark = Source(1000, 500), 4096, "0f" * 16
    pieces: list[Piece] = []
    for number, drawn in (("7", mark), ("9", "00" * 16)):
        memory = Memory(os.memfd_create("piece"), size_bytes, huge=False)
        os.pwrite(memory.fd, b"HEGMWRK1" + bytes.fromhex(drawn), 0)
        pieces.append(Piece(PieceName(Key(number, "4711"), size_bytes, "ab", mine), size_bytes, memory))
    pool = pool_of(*pieces)
    assert await found_for(pool, standing(mine, size_bytes, mark=mark), "4711") == str(pieces[0].name)
    for unknown in ("", "11" * 16, None):
        with pytest.raises(Refused, match="2 pool segments could belong to process 4711"):
            await found_for(pool, standing(mine, size_bytes, mark=unknown), "4711")
    own = standing(mine, size_bytes, mark="", entrusted=False)
    assert await found_for(pool, own, "4711") is None, "it has a descriptor of its own"
    pool.close()


async def test_a_spilled_piece_is_known_by_its_mark(tmp_path: Path) -> None:
    mine, size_bytes, folder = Source(1000, 500), 4096, SpillFolder(tmp_path / "spill", spare_bytes=0)
    names = [PieceName(Key(number, "4711"), size_bytes, nonce, mine) for number, nonce in (("7", "ab"), ("9", "cd"))]
    for name, drawn in zip(names, (1, 2), strict=True):
        fd = os.memfd_create("piece")
        os.pwrite(fd, b"HEGMWRK1" + bytes([drawn]) * 16 + bytes(size_bytes - 24), 0)
        folder.write(str(name), fd, size_bytes, lambda: False, lambda _: None)
        os.close(fd)
    pool = pool_of(*[Piece(name, size_bytes, spilled=True) for name in names])
    pool.keep = MemoryKeeping(spill=folder)
    assert await found_for(pool, standing(mine, size_bytes, mark="02" * 16), "4711") == str(names[1])


async def test_a_snapshot_without_a_record_was_to_be_adopted_as_a_process() -> None:
    """It is left when the disk was full and the daemon was killed. The hint was `hegmctl adopt 0.1`."""
    name = PieceName(Key("j4", "0.1"), 4096, "ab", Source(1000, 500))
    (orphan,) = PoolOrphans(pool_of(Piece(name, 4096, spilled=True)), "operation {} is unknown".format).orphans()
    assert orphan.why == "it is a snapshot of job j4, whose recovery has no record of it"
    assert orphan.next == f"nothing can continue from it; run: hegmctl adopt --drop {name}"
    assert orphan.pid is None


async def test_a_dry_run_adopts_nothing(tmp_path: Path, process: Child) -> None:
    agent = await suspended(tmp_path, process.pid)
    async with running(tmp_path) as node:
        await back(agent, node)
        answer = await node.operations.adopt(process.pid, "gpu0", node.context(dry_run=True))
        assert answer.operation is None
        assert answer.plan is not None
        assert len(node.moving.orphans.all()) == 2


def anybody(_uid: int | None) -> bool:
    """A caller who may act on everything."""
    return True


@pytest.mark.thorough
async def test_orphaned_bytes_are_dropped_by_name_only_and_processes_never(tmp_path: Path, process: Child) -> None:
    agent = await suspended(tmp_path, process.pid)
    async with running(tmp_path) as node:
        await back(agent, node)
        orphans = node.moving.orphans
        with pytest.raises(HegmError, match="is a process"):
            await orphans.drop(str(process.pid), anybody)
        with pytest.raises(HegmError, match="there is no orphan"):
            await orphans.drop("hegm-pool-1", anybody)
        (name,) = node.moving.pool.unclaimed()
        with pytest.raises(HegmError, match=rf"can only be dropped by its owner: it is of uid {os.getuid()}") as denied:
            await orphans.drop(name, lambda uid: uid == os.getuid() + 1)
        assert denied.value.code is DENIED
        assert await orphans.drop(name, lambda uid: uid == os.getuid()), "its owner may"
        assert not (tmp_path / "memory").exists()
        assert node.events.counts["pool.dropped"] == 1
        await node.operations.adopt(process.pid, "gpu0", node.context(dry_run=True))


@pytest.mark.thorough
async def test_a_second_park_of_a_process_is_reported_again(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = ModelAgent(node.workers, process.pid)
        for times in (1, 2):
            agent.parked = True
            await agent.attend(node.tasks)
            await agent.leave()
            await agent.attend(node.tasks)  # once more is no news
            assert node.events.counts["pool.orphan"] == times
            await node.operations.adopt(process.pid, "gpu0", node.context())
            await agent.leave()
            await agent.attend(node.tasks)


async def test_an_untrusted_file_is_reported_and_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir(mode=0o700)
    file = tmp_path / "spill" / "hegm-pool-7-4711-3.ab.spill"
    file.write_bytes(b"torn")
    file.chmod(0o600)
    async with running(tmp_path) as node:
        (orphan,) = node.moving.orphans.all()
        assert (orphan.kind, "cut short" in orphan.why) == ("unknown", True)
        with pytest.raises(HegmError, match="unknown to hegmd"):
            await node.moving.orphans.drop(orphan.name, anybody)
    assert file.exists()


class ByDriver:
    """The driver of real GPUs, which has that process so."""

    def __init__(self, gpu: str | None, driver_bytes: int = 0) -> None:
        self.gpu = gpu
        self.driver_bytes = driver_bytes

    async def inspect(self, pid: int) -> DriverProcess:
        state = "checkpointed" if self.gpu is None else "running"
        return DriverProcess(
            pid=pid, start_ticks=1, uid=0, name="x", state=state, gpu=self.gpu, driver_bytes=self.driver_bytes
        )


@pytest.mark.thorough
@pytest.mark.parametrize(("mark", "carrier"), [("", "host"), ("0f" * 16, "worker")])
async def test_a_job_on_a_real_gpu_was_not_adopted_for_want_of_a_figure(
    tmp_path: Path, process: Child, mark: str, carrier: str
) -> None:
    """The driver's bytes are limited by the process's memory; its storages are added."""
    agent = await suspended(tmp_path, process.pid)
    async with running(tmp_path) as node:
        agent.about = {"mark": mark}
        await back(agent, node)
        orphans = ParkedOrphans(node.workers, lambda _pid: False, by_driver=ByDriver(None, 3 * MIB))
        (found,) = await orphans.job_of(process.pid)
        (worker,) = adopted("1", [found], utc=0.0).workers
        assert (worker.method, worker.carrier, worker.gpu_unknown, worker.gpu) == ("driver", carrier, True, None)
        assert worker.reservation_bytes == 3 * MIB + found.size_bytes
        assert found.size_bytes >= found.held_bytes > 0
        agent.about = {}
        await agent.leave()
        await back(agent, node)
        with pytest.raises(Refused, match="does not report how"):
            await orphans.job_of(process.pid)


async def test_an_orphan_parked_on_its_gpu_with_all_bytes_needs_no_memory(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = ModelAgent(node.workers, process.pid)
        agent.parked = True
        await agent.attend(node.tasks)
        orphans = ParkedOrphans(node.workers, lambda _pid: False, by_driver=ByDriver("gpu1"))
        (worker,) = adopted("1", await orphans.job_of(process.pid), utc=0.0).workers
        assert (worker.gpu, worker.first_gpu, worker.reservation_bytes, worker.is_parked) == ("gpu1", "gpu1", 0, True)


async def test_orphaned_video_memory_in_a_store_is_reported(tmp_path: Path) -> None:
    memory = VideoMemory(Link())
    gpu = "GPU-00000000-0000-0000-0000-000000000001"
    for who in ("7.4711.bytes", "8.4712.bytes"):
        assert memory.adopt(f"hegm-vram-{who}-{gpu}-0-{MIB}", os.memfd_create("video"))
    found = VideoOrphans(
        memory,
        lambda key: key == Key("8", "4712"),
        lambda op: f"{op} is gone",
        lambda _: "gpu0",
        Workers(lambda _: None),
    )
    (orphan,) = found.orphans()
    assert (orphan.name, orphan.pid, orphan.size_bytes) == (f"hegm-vram-7.4711.bytes-{gpu}", 4711, MIB)
    assert (orphan.where, orphan.why, orphan.uid) == ("video memory of gpu0", "7 is gone", None)
    assert await found.drop(orphan.name) == MIB
    assert list(found.orphans()) == []
    assert list(memory.by_owner()) == [("8.4712.bytes", gpu)]
    memory.close()


def out_of(pid: int, start_ticks: int, held_bytes: int) -> AgentConnection:
    about = AgentAttend(token="a" * 32, python_version="3", boundary=1, held_bytes=held_bytes, mark="")
    return AgentConnection(Identity(pid, start_ticks, 1000), AgentInfo(name="x", version="1"), about)


async def test_video_memory_goes_to_the_process_whose_start_it_names_and_to_none_if_two_match() -> None:
    """A pid is used again, and one job's weights would be another's."""
    memory, pool = VideoMemory(Link()), Pool(MIB)
    gpu = "GPU-00000000-0000-0000-0000-000000000001"
    for who in ("7.4711.bytes@500", "7.4712.bytes", "7.4713.passing@500"):
        assert memory.adopt(f"hegm-vram-{who}-{gpu}-0-{MIB}", os.memfd_create("video"))
    video = VideoOrphans(memory, lambda _: False, str, str, Workers(lambda _: None))
    found = OrphanedMemory(pool, memory, video)
    mine = out_of(4711, 500, MIB)
    (one,) = await found.in_video(mine, "4711")
    assert one.who == "7.4711.bytes@500"
    for other in (out_of(4711, 501, MIB), out_of(4712, 500, MIB), out_of(4713, 500, MIB), out_of(4711, 500, 0)):
        assert await found.in_video(other, str(other.pid)) == ()
    with pytest.raises(Refused, match="reaches to"):
        await found.in_video(out_of(4711, 500, MIB + 1), "4711")
    await found.claim(mine, Key("9", "4711"))
    assert found.has(mine, Key("9", "4711"))
    assert memory.of("9.4711.bytes@500") == {gpu: MIB}
    assert memory.adopt(f"hegm-vram-3.4711.bytes@500-{gpu}-0-{MIB}", os.memfd_create("video"))
    with pytest.raises(Refused, match="cannot tell which"):
        await found.in_video(mine, "4711")
    memory.close()
    pool.close()


async def test_video_memory_on_several_gpus_is_one_copy_and_goes_to_its_process_whole() -> None:
    """The first piece for each device tells which one it is for."""
    memory, pool = VideoMemory(Link()), Pool(MIB)
    first, second = (f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in (1, 2))
    assert memory.adopt(f"hegm-vram-7.4711.bytes@500-{second}-0-{MIB}", os.memfd_create("video"))
    video = VideoOrphans(memory, lambda _: False, str, str, Workers(lambda _: None))
    found = OrphanedMemory(pool, memory, video)
    mine = out_of(4711, 500, 3 * MIB)
    with pytest.raises(Refused, match=f"reaches to {MIB}"):
        await found.in_video(mine, "4711")
    name = f"hegm-vram-7.4711.bytes@500-{first}-{DEVICE_BYTES}-{2 * MIB}"
    assert memory.adopt(name, os.memfd_create("video"))
    assert {one.gpu for one in await found.in_video(mine, "4711")} == {first, second}
    await found.claim(mine, Key("9", "4711"))
    assert memory.of("9.4711.bytes@500") == {first: 2 * MIB, second: MIB}
    assert found.has(mine, Key("9", "4711"))
    assert memory.pieces("9.4711.bytes@500", first)[0].at == DEVICE_BYTES
    memory.close()
    pool.close()

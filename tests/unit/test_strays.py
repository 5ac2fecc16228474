"""What no operation has: found, told of, adopted by a person's word, and given up by nothing less."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hegmd.errors import DENIED, NOT_FOUND, REFUSED, HegmError, Refused
from hegmd.migration.adoption import Driven
from hegmd.pool import Key, Piece, Source
from hegmd.pool_names import PieceName
from hegmd.strays import StandingStrays, found_for
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import Node, running

Child = subprocess.Popen[bytes]


async def suspended(state_dir: Path, pid: int, *, spill: bool = False) -> ModelAgent:
    """An agent that a daemon suspended before it lost its journal."""
    async with running(state_dir) as node:
        agent = await node.attend(pid)
        await node.operations.suspend([pid], node.asked(), spill=spill)
    (state_dir / "operations.journal").unlink()
    return agent


async def back(agent: ModelAgent, node: Node) -> None:
    agent.workers = node.workers
    await agent.attend(node.tasks)


async def test_parked_agents_and_bytes_without_a_journal_are_listed_and_brought_back(
    tmp_path: Path, process: Child
) -> None:
    agent = await suspended(tmp_path, process.pid, spill=True)
    async with running(tmp_path) as node:
        await back(agent, node)
        by_kind = {stray.kind: stray for stray in node.moving.strays.all()}
        assert set(by_kind) == {"bytes", "process"}
        assert "operation 1 is not in the journal" in by_kind["bytes"].why
        assert by_kind["bytes"].pid == process.pid
        assert by_kind["process"].next == f"hegmctl adopt {process.pid}"
        assert node.events.counts["pool.stray"] == 2
        with pytest.raises(HegmError, match="not known on which GPU"):
            await node.operations.adopt(process.pid, None, node.asked())
        assert agent.data is None
        answer = await node.operations.adopt(process.pid, "gpu1", node.asked())
        assert answer.operation is not None
        assert (answer.operation.phase, answer.operation.failure) == ("done", None)
        assert (agent.data, agent.parked) == (b"weights", False)
        assert node.rooms(process.pid) == {"gpu1": 7}
        assert node.moving.strays.all() == ()
        assert node.moving.pool.spilled_bytes == 0


async def test_one_that_has_its_own_descriptor_needs_no_piece(tmp_path: Path, process: Child) -> None:
    agent = await suspended(tmp_path, process.pid)
    async with running(tmp_path) as node:
        await back(agent, node)
        await node.operations.adopt(process.pid, "gpu0", node.asked())
        assert agent.data == b"weights"
        assert node.moving.strays.all() == (), "its bytes in memory are not its own any more"


async def test_a_job_is_adopted_whole(tmp_path: Path, process: Child, other: Child) -> None:
    async with running(tmp_path) as node:
        agents = [ModelAgent(node.workers, child.pid, token=4 * f"{child.pid:08d}") for child in (process, other)]
        for agent in agents:
            agent.about, agent.parked = {"job": "train"}, True
            await agent.attend(node.tasks)
        answer = await node.operations.adopt(process.pid, "gpu0", node.asked())
        assert answer.operation is not None
        assert sorted(one.pid for one in answer.operation.processes) == sorted([process.pid, other.pid])
        assert answer.operation.phase == "done"
        assert [agent.parked for agent in agents] == [False, False]


async def test_an_adoption_that_cannot_be_finished_leaves_a_suspended_operation(tmp_path: Path, process: Child) -> None:
    agent = await suspended(tmp_path, process.pid)
    async with running(tmp_path) as node:
        await back(agent, node)
        agent.refuses["refill"] = "no memory for it"
        answer = await node.operations.adopt(process.pid, "gpu0", node.asked())
        assert answer.operation is not None
        assert answer.operation.phase == "suspended"
        agent.refuses.clear()
        await node.operations.resume(process.pid, "gpu1", node.asked())
        assert agent.data == b"weights"


@pytest.mark.parametrize("how", ["nobody", "training", "taken", "stranger", "elsewhere"])
async def test_what_is_no_stray_is_not_adopted(tmp_path: Path, process: Child, how: str) -> None:
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
            await node.operations.suspend([process.pid], node.asked())
        with pytest.raises(HegmError) as refused:
            await node.operations.adopt(pid, to, node.asked(may=may))
        assert refused.value.code is code or how == "taken"
        assert "1" not in [op.id for op in node.operations.runner.operations()] or how == "taken"


def test_bytes_of_a_process_were_given_to_another_users_of_the_same_pid() -> None:
    mine, size_bytes = Source(1000, 500), 4096
    names = [
        PieceName(Key("7", "4711"), size_bytes, "ab", mine),
        PieceName(Key("8", "4711"), size_bytes, "cd", Source(1001, 500)),
        PieceName(Key("9", "4711"), size_bytes, "ef", Source(1000, 501)),
        PieceName(Key("10", "4711"), size_bytes, "0a"),  # of a release that did not say whose it is
    ]
    pieces = {str(name): Piece(name, size_bytes, spilled=True) for name in names}
    assert found_for(pieces, "4711", mine, size_bytes) == str(names[0])
    assert found_for(pieces, "4711", Source(1002, 500), size_bytes) is None
    assert found_for(pieces, "4712", mine, size_bytes) is None
    assert found_for(pieces, "4711", mine, size_bytes + 1) is None


async def test_a_dry_run_adopts_nothing(tmp_path: Path, process: Child) -> None:
    agent = await suspended(tmp_path, process.pid)
    async with running(tmp_path) as node:
        await back(agent, node)
        answer = await node.operations.adopt(process.pid, "gpu0", node.asked(dry_run=True))
        assert answer.operation is None
        assert answer.plan is not None
        assert len(node.moving.strays.all()) == 2


async def test_bytes_are_given_up_by_name_only_and_a_process_never(tmp_path: Path, process: Child) -> None:
    agent = await suspended(tmp_path, process.pid)
    async with running(tmp_path) as node:
        await back(agent, node)
        strays = node.moving.strays
        with pytest.raises(HegmError, match="is a process"):
            await strays.drop(str(process.pid))
        with pytest.raises(HegmError, match="nothing stray is called"):
            await strays.drop("hegm-pool-1")
        (name,) = node.moving.pool.unclaimed()
        assert await strays.drop(name)
        assert not (tmp_path / "memory").exists()
        assert node.events.counts["pool.dropped"] == 1
        await node.operations.adopt(process.pid, "gpu0", node.asked(dry_run=True))


async def test_a_process_that_stands_a_second_time_is_told_of_a_second_time(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = ModelAgent(node.workers, process.pid)
        for times in (1, 2):
            agent.parked = True
            await agent.attend(node.tasks)
            await agent.leave()
            await agent.attend(node.tasks)  # once more is no news
            assert node.events.counts["pool.stray"] == times
            await node.operations.adopt(process.pid, "gpu0", node.asked())
            await agent.leave()
            await agent.attend(node.tasks)


async def test_what_cannot_be_believed_is_told_of_and_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir(mode=0o700)
    file = tmp_path / "spill" / "hegm-pool-7-4711-3.ab.spill"
    file.write_bytes(b"torn")
    async with running(tmp_path) as node:
        (stray,) = node.moving.strays.all()
        assert (stray.kind, "cut short" in stray.why) == ("unknown", True)
        with pytest.raises(HegmError, match="nothing that hegmd knows"):
            await node.moving.strays.drop(stray.name)
    assert file.exists()


class NeverAsked:
    """The driver of real GPUs."""

    async def stands(self, pid: int) -> Driven:
        raise AssertionError(f"{pid} is asked about")


async def test_a_job_on_a_real_gpu_was_adopted_with_no_word_of_the_room_that_its_restore_needs(
    tmp_path: Path, process: Child
) -> None:
    agent = await suspended(tmp_path, process.pid)
    async with running(tmp_path) as node:
        await back(agent, node)
        standing = StandingStrays(node.workers, lambda _pid: False, by_driver=NeverAsked())
        assert [stray.pid for stray in standing.strays()] == [process.pid], "it is not even told of"
        with pytest.raises(Refused, match="was in the journal alone"):
            await standing.job_of(process.pid)
        assert agent.data is None

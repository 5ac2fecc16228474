"""Jobs keep their ids, their names and their ends, whatever becomes of their processes and of the daemon.

Longer than 400 lines because the register of jobs and the requests on it are tested on the same node.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from hegmd.errors import BAD_REQUEST, BUSY, DENIED, NOT_FOUND, REFUSED, HegmError
from hegmd.node.processes.procfs import seconds_since_boot
from hegmd.operations.job_requests import APART_S
from hegmd.protocol import jobs as protocol
from hegmd.protocol.messages import RegisterJob
from hegmd.protocol.snapshots import GpuProcess
from hegmd.workers.job_file import DAMAGED_NAME, NAME, JobFile, JobRecord
from hegmd.workers.job_names import MAX_COMMAND_CHARS, MAX_RUN_CHARS, name_of, script_of, shown_command
from hegmd.workers.jobs import MAX_ALIVE_OF_USER, MAX_ENDED_OF_USER, MAX_RUNS
from tests.cells import in_one_test
from tests.patience import HANG_S
from tests.unit.moving_node import Node, running, start_ticks

Child = subprocess.Popen[bytes]
UID = os.geteuid()
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def mine(uid: int | None) -> bool:
    return uid == UID


def owns_none(_uid: int | None) -> bool:
    return False


async def registered(node: Node, pid: int, run: str, *words: str, name: str | None = None, uid: int = UID) -> str:
    request = RegisterJob(run=run, name=name, command=words or ("python3", "train.py", "--epochs", "5"))
    return (await node.moving.jobs.register(pid, uid, request)).id


async def jobs_by_id(node: Node, *, ended: bool = False) -> dict[str, protocol.Job]:
    return {job.id: job for job in await node.moving.job_requests.jobs((), mine, ended=ended)}


async def until(node: Node, holds: Callable[[], bool]) -> None:
    with anyio.fail_after(HANG_S):
        while not holds():
            news = node.moving.jobs.changed.next
            if not holds():
                await news.wait()


def waiting_to_exit(status: int) -> Child:
    """A process that exits with that status once its input ends."""
    return subprocess.Popen(["sh", "-c", f"read x; exit {status}"], stdin=subprocess.PIPE)


def started(script: Path, *words: str) -> Child:
    """A Python that runs a script, which has printed a line: the kernel shows its command line from then on."""
    child = subprocess.Popen([sys.executable, str(script), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def has_ended(node: Node, job_id: str) -> bool:
    return any(job.id == job_id and not job.is_alive for job in node.moving.jobs)


async def ended_job(node: Node, run: str, status: int, *, killed: bool = False) -> str:
    """Return the id of a job that ended so. Reaped last: earlier kernels report the status only until then."""
    with waiting_to_exit(status) as child:
        job_id = await registered(node, child.pid, run)
        assert child.stdin is not None
        if killed:
            child.kill()
        child.stdin.close()
        await until(node, lambda: has_ended(node, job_id))
        return job_id


@in_one_test(
    ("command", "shown", "name"),
    [
        ("python train.py --epochs 5", "train.py --epochs 5", "train"),
        ("/usr/bin/python3.11 -u src/train.py", "src/train.py", "train"),
        ("torchrun --nproc-per-node 2 train.py --lr 1", "train.py --lr 1", "train"),
        ("python -m torch.distributed.run --nproc-per-node 2 -m pkg.train a", "-m pkg.train a", "pkg.train"),
        ("python -W ignore main --x", "main --x", "main"),
        ("python -c pass", "python -c pass", "python"),
        ("env A=1 python3 t.py", "t.py", "t"),
        ("bash run.sh a", "run.sh a", "run"),
        ("/opt/bin/llama --config conf.py", "/opt/bin/llama --config conf.py", "llama"),
        ("python 4711", "4711", "job-4711"),
        ("python j7.py", "j7.py", "job-j7"),
    ],
)
def test_a_job_is_shown_and_named_by_its_script(command: str, shown: str, name: str) -> None:
    script = script_of(command.split())
    assert (shown_command(script), name_of(script)) == (shown, name)


def test_a_command_of_any_length_and_content_is_one_short_line() -> None:
    assert len(shown_command(("x" * 9999,))) == MAX_COMMAND_CHARS
    assert shown_command(("a b", "\x1b[2J", "")) == "'a b' '\x1b[2J' ''"
    assert name_of(("/",)) == name_of(()) == "job"


async def test_two_jobs_of_one_script_have_names_of_their_own(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        assert await registered(node, process.pid, "one") == "j1"
        assert await registered(node, second_process.pid, "two") == "j2"
        assert await registered(node, second_process.pid, "two") == "j2", "the same run is the same job"
        jobs = await jobs_by_id(node)
        assert [(job.name, job.state, job.command) for job in jobs.values()] == [
            ("train", "starting", "train.py --epochs 5"),
            ("train-2", "starting", "train.py --epochs 5"),
        ]


@pytest.mark.thorough
async def test_a_job_keeps_its_id_when_the_daemon_is_killed(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        await registered(node, process.pid, "one", name="mine")
        await registered(node, second_process.pid, "two")
        kept = await anyio.Path(tmp_path / NAME).read_bytes()
        second_process.kill()
        second_process.wait()
        await until(node, lambda: has_ended(node, "j2"))
    (tmp_path / NAME).write_bytes(kept)  # as after a kill before the daemon noticed the end of j2
    async with running(tmp_path) as node:
        jobs = await jobs_by_id(node, ended=True)
        assert {job.id: job.name for job in jobs.values()} == {"j1": "mine", "j2": "train"}
        agent = await node.attend(process.pid, run="one")
        assert (await jobs_by_id(node))["j1"].state == "training"
        await agent.leave()
        assert await registered(node, process.pid, "three") == "j1", "a run within a run takes its place"


async def test_a_damaged_file_is_kept_and_its_ids_are_not_reused(tmp_path: Path, process: Child) -> None:
    file = JobFile(tmp_path)
    job = JobRecord(number=41, name="a", uid=0, runs=("r",), command="", started_utc=0.0, boot="")
    file.save(42, [job])
    assert file.load() == (42, [job])
    whole = (tmp_path / NAME).read_bytes()
    for at in (0, 12, len(whole) // 2, len(whole) - 1):
        (tmp_path / NAME).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        number, jobs = file.load()
        assert (number >= 42 or at == len(whole) // 2, jobs) == (True, [])
        assert (tmp_path / DAMAGED_NAME).exists()
    (tmp_path / NAME).write_bytes(whole[:-9])
    async with running(tmp_path) as node:
        assert await registered(node, process.pid, "one") == "j42"


@pytest.mark.parametrize("status", [7, -9])
async def test_the_exit_status_of_a_job_is_known_though_it_is_no_child(tmp_path: Path, status: int) -> None:
    async with running(tmp_path) as node:
        job_id = await ended_job(node, "one", 7, killed=status < 0)
        with anyio.fail_after(HANG_S):
            job = await node.moving.job_requests.wait(job_id, mine, _unheard)
        assert (job.state, job.status) == ("ended", status)


async def _unheard(_job: protocol.Job) -> None:
    pass


async def test_a_request_that_names_an_ended_job_reports_its_end(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await ended_job(node, "one", 3)
        for name in ("j1", "train"):
            with pytest.raises(HegmError, match=r"job j1 \(train\) ended .* ago, with exit status 3") as refused:
                await node.moving.job_requests.pids((name,), mine)
            assert refused.value.code is NOT_FOUND
        with pytest.raises(HegmError, match="there is no job 'traim'") as refused:
            await node.moving.job_requests.pids(("traim",), mine)
        assert "did you mean train?" in refused.value.hint


async def test_a_name_that_two_jobs_had_is_the_running_one_or_a_choice(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        for run in ("one", "two"):
            await ended_job(node, run, 3)
        with pytest.raises(HegmError, match=r"2 jobs were called 'train': j1 \(ended .*\), j2 \(ended") as refused:
            await node.moving.job_requests.one("train", mine)
        assert refused.value.code is BAD_REQUEST
        await registered(node, process.pid, "three")
        assert (await node.moving.job_requests.one("train", mine)).id == "j3"


async def test_a_hint_names_the_job_and_not_its_pid(tmp_path: Path, process: Child, second_process: Child) -> None:
    """Issue 19: the planner knows processes, and users know jobs."""
    async with running(tmp_path) as node:
        await registered(node, process.pid, "run-1", name="bert")
        rest = f"or: hegmctl migrate {second_process.pid} --to gpu1; see hegmctl op {process.pid}"
        hint = f"run: hegmctl resume {process.pid}; {rest}"
        assert node.moving.job_requests.by_name(hint, mine) == f"run: hegmctl resume bert; {rest}"


@pytest.mark.thorough
async def test_an_operation_and_a_plan_name_the_jobs_of_their_processes(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        await registered(node, process.pid, "run-1", name="bert")
        await node.attend(process.pid, run="run-1")
        requests = node.moving.job_requests
        planned = (await node.operations.suspend([process.pid], node.context(dry_run=True))).plan
        assert planned is not None
        assert [(worker.job, worker.job_name) for worker in requests.plan_with_jobs(planned, mine).workers] == [
            ("j1", "bert")
        ]
        operation = (await node.operations.suspend([process.pid], node.context())).operation
        assert operation is not None
        described = requests.with_job(operation)
        assert (described.job, described.processes[0].job_name) == ("j1", "bert")
        assert described.waits is not None
        assert described.waits.next == "hegmctl resume bert"


@pytest.mark.thorough
async def test_an_operation_names_its_job_after_the_job_has_ended(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """Issue 19: `hegmctl ops` had `-` for jobs of several ranks that had ended, and after a restore."""
    async with running(tmp_path) as node:
        job_id = await registered(node, process.pid, "run-1", name="bert")
        await node.attend(second_process.pid, run="run-1")
        moved = (await node.operations.migrate([second_process.pid], "gpu1", node.context())).operation
        assert moved is not None
        assert node.moving.job_requests.with_job(moved).job == job_id
        for child in (second_process, process):
            child.kill()
            child.wait()
        await until(node, lambda: has_ended(node, job_id))
        assert node.moving.job_requests.with_job(moved).processes[0].job_name == "bert"


async def test_a_job_before_its_first_batch_is_not_moved(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        await registered(node, process.pid, "one")
        with pytest.raises(HegmError, match=r"job j1 \(train\) is starting") as refused:
            await node.moving.job_requests.pids(("train",), mine)
        assert refused.value.code is REFUSED
        await node.attend(process.pid, run="one")
        assert await node.moving.job_requests.pids(("j1", "train", str(process.pid), 7), mine) == (process.pid, 7)


async def test_a_job_that_had_trained_was_said_not_to_have_reached_its_first_batch(
    tmp_path: Path, process: Child
) -> None:
    """After a restart of the daemon, before its agents are back: the hint was to wait until it is shown as training."""
    async with running(tmp_path) as node:
        await registered(node, process.pid, "one")
        await node.attend(process.pid, run="one")
        assert await node.moving.job_requests.pids(("train",), mine) == (process.pid,)
    async with running(tmp_path) as node:
        requests = node.moving.job_requests
        assert [job.state for job in await requests.jobs((), mine, ended=False)] == [protocol.TRAINING]
        with pytest.raises(HegmError, match=r"no process of job j1 \(train\) is known to train now") as refused:
            await requests.pids(("train",), mine)
        assert (refused.value.code, "hegmctl inspect j1" in (refused.value.hint or "")) == (REFUSED, True)
        await node.attend(process.pid, run="one")
        assert await requests.pids(("train",), mine) == (process.pid,)


async def test_a_job_that_trained_for_days_was_starting_if_nobody_looked_before_the_daemon_restarted(
    tmp_path: Path, process: Child
) -> None:
    """Only a look recorded that it trains. Without one, its state is unknown until its agent is back."""

    async def states(node: Node) -> list[tuple[str, str | None]]:
        jobs = await node.moving.job_requests.jobs((), mine, ended=False)
        return [(job.state, job.waits and job.waits[:10]) for job in jobs]

    async with running(tmp_path) as node:
        await registered(node, process.pid, "one")
        agent = await node.attend(process.pid, run="one")
        await until(node, lambda: any(job.members for job in node.moving.jobs))
        names = "unknown form", "7-", "-7"  # as a later version might record
        kept = [job.replace(has_trained=False, members=(*job.members, *names)) for job in node.moving.jobs]
        await agent.leave()
    JobFile(tmp_path).save(2, kept)  # as if it had connected before its first batch
    async with running(tmp_path) as node:
        assert await states(node) == [(protocol.WAITING, "its agents")]
        await node.attend(process.pid, run="one")
        await until(node, lambda: all(job.has_trained for job in node.moving.jobs))
    async with running(tmp_path) as node:
        assert await states(node) == [(protocol.TRAINING, None)]


async def test_a_user_can_name_only_own_jobs_and_see_only_own_commands(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        await registered(node, process.pid, "one")
        requests = node.moving.job_requests
        for request in (
            requests.pids(("train",), owns_none),
            requests.one("j1", owns_none),
            requests.one(process.pid, owns_none),
        ):
            with pytest.raises(HegmError, match=f"belongs to uid {UID}") as refused:
                await request
            assert refused.value.code is DENIED
        (job,) = await requests.jobs((), owns_none, ended=False)
        assert (job.id, job.command, job.processes, job.notes) == ("j1", None, (), ())


async def test_the_ranks_of_a_job_are_one_job_and_move_by_its_name(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid, run="one", rank=0, world_size=2)
        await node.attend(second_process.pid, token="b" * 32, run="one", rank=1, world_size=2)
        await until(node, lambda: any(len(job.members) == 2 for job in node.moving.jobs))
        (job,) = (await jobs_by_id(node)).values()
        assert [(one.pid, one.role, one.rank) for one in job.processes] == [
            (process.pid, "rank", 0),
            (second_process.pid, "rank", 1),
        ]
        assert await node.moving.job_requests.pids((job.name,), mine) == (process.pid, second_process.pid)
        assert (await node.moving.job_requests.one(second_process.pid, mine)).id == job.id


@pytest.mark.thorough
async def test_a_suspended_job_is_named_by_its_operation_while_no_agent_is_connected(
    tmp_path: Path, process: Child
) -> None:
    async with running(tmp_path) as node:
        await registered(node, process.pid, "one")
        await node.attend(process.pid, run="one")
        pids = await node.moving.job_requests.pids(("train",), mine)
        ended = await node.operations.suspend(pids, node.context())
        assert ended.operation is not None
        assert (await jobs_by_id(node))["j1"].state == "suspended"
        assert node.moving.job_requests.with_job(ended.operation).job == "j1"
    async with running(tmp_path) as node:  # the next daemon, to which no agent has come back
        assert (await jobs_by_id(node))["j1"].state == "suspended"
        assert await node.moving.job_requests.pids(("j1",), mine) == (process.pid,)
        assert node.moving.job_requests.with_job(ended.operation).job == "j1"


@pytest.mark.thorough
async def test_a_process_on_a_gpu_is_listed_with_its_job_but_not_another_one_with_its_pid(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        await registered(node, process.pid, "one")
        await node.attend(second_process.pid, run="one")
        await until(node, lambda: any(job.members for job in node.moving.jobs))
        jobs = {one.pid: one for one in (await jobs_by_id(node))["j1"].processes}
        assert set(jobs) == {process.pid, second_process.pid}
        of_process = node.moving.job_requests.of_process
        for pid in jobs:
            ticks = start_ticks(pid)
            assert ticks is not None
            assert of_process(GpuProcess(pid=pid, start_ticks=ticks, gpus=())).job == "j1"
            assert of_process(GpuProcess(pid=pid, start_ticks=ticks + 1, gpus=())).job is None
            assert of_process(GpuProcess(pid=pid, gpus=())).job is None


@pytest.mark.thorough
async def test_the_rate_of_a_job_is_that_of_its_slowest_rank(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        first = await node.attend(process.pid, run="one", rank=0, world_size=2)
        second = await node.attend(second_process.pid, token="b" * 32, run="one", rank=1, world_size=2)
        await until(node, lambda: any(len(job.members) == 2 for job in node.moving.jobs))
        (job,) = (await jobs_by_id(node)).values()
        assert (job.boundary, job.steps_per_s) == (5, None), "it has come to no batch since it was first looked at"
        first.boundary, second.boundary = 5 + 400, 5 + 200
        (job,) = (await jobs_by_id(node)).values()
        assert job.boundary == 205
        assert job.steps_per_s is not None
        assert 0 < job.steps_per_s <= 200 / APART_S
        second.boundary = 3  # a restart goes back to an earlier batch
        (job,) = (await jobs_by_id(node)).values()
        assert job.boundary == 3
        assert "count" in first.orders


@pytest.mark.thorough
async def test_the_rate_of_a_resumed_job_leaves_out_the_time_of_its_suspension(tmp_path: Path, process: Child) -> None:
    """A job of 12 batches a second was shown with 0.2 for a minute after it had been suspended for a minute."""
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid, run="one")
        pids = tuple(one.pid for one in (await jobs_by_id(node))["j1"].processes)
        agent.boundary += 400
        assert (await jobs_by_id(node))["j1"].steps_per_s is not None
        suspended = await node.operations.suspend(pids, node.context())
        assert suspended.operation is not None
        await node.operations.resume(process.pid, None, node.context())
        resumed = (await jobs_by_id(node))["j1"]
        assert (resumed.state, resumed.steps_per_s) == ("training", None), "it was not seen to go on since"


@pytest.mark.thorough
async def test_ended_jobs_are_remembered_up_to_a_number_of_each_user(tmp_path: Path, process: Child) -> None:
    old = [
        JobRecord(
            number=number,
            name=f"a{number}",
            uid=UID,
            runs=(f"r{number}",),
            command="",
            started_utc=0.0,
            boot=BOOT,
            ended_utc=4e9 + number,
            ended_boot_s=seconds_since_boot(),
        )
        for number in range(1, MAX_ENDED_OF_USER + 10)
    ]
    JobFile(tmp_path).save(len(old) + 1, old)
    async with running(tmp_path) as node:
        await registered(node, process.pid, "one")
        ended = [job for job in await jobs_by_id(node, ended=True) if job != f"j{len(old) + 1}"]
        assert len(ended) == MAX_ENDED_OF_USER
        assert "j1" not in ended
        assert f"j{len(old)}" in ended


async def test_ended_jobs_were_forgotten_when_the_clock_was_set(tmp_path: Path, process: Child) -> None:
    """Their age was that of the wall clock."""
    now_s = seconds_since_boot()
    plain = JobRecord(number=1, name="one", uid=UID, runs=("r1",), command="x", started_utc=0.0, boot=BOOT)
    recent = plain.replace(ended_utc=1.0, ended_boot_s=now_s)
    old = plain.replace(number=2, name="two", runs=("r2",), ended_utc=time.time(), ended_boot_s=now_s - 31 * 86400.0)
    JobFile(tmp_path).save(3, [recent, old])
    async with running(tmp_path) as node:
        await registered(node, process.pid, "run")
        assert {job.id for job in node.moving.jobs} == {"j1", "j3"}


async def test_two_processes_that_registered_one_run_in_turn_used_up_the_descriptors(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """Each change of the job's first process began another watch, which held a descriptor until that process ended."""
    async with running(tmp_path) as node:
        await registered(node, process.pid, "run")
        await anyio.wait_all_tasks_blocked()
        before = len(os.listdir("/proc/self/fd"))
        for turn in range(20):
            await registered(node, (second_process, process)[turn % 2].pid, "run")
            await anyio.wait_all_tasks_blocked()
        assert len(os.listdir("/proc/self/fd")) == before
        process.kill()
        process.wait()
        await until(node, lambda: has_ended(node, "j1"))


@pytest.mark.thorough
async def test_a_process_whose_agents_replaced_one_another_used_up_the_descriptors(
    tmp_path: Path, process: Child
) -> None:
    """The daemon watched the process for each agent of before, and for a job of each."""
    async with running(tmp_path) as node:
        await node.attend(process.pid, token=f"{0:032}", run="r0")
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1, 20):
            await node.attend(process.pid, token=f"{number:032}", run=f"r{number}")
        await until(node, lambda: (job := node.moving.jobs.of_run(UID, "r19")) is not None and job.id == "j1")
        await until(node, lambda: len(os.listdir("/proc/self/fd")) == before)
        assert len(await jobs_by_id(node, ended=True)) == 1


@pytest.mark.thorough
async def test_two_processes_of_a_user_could_keep_any_number_of_jobs(tmp_path: Path, process: Child) -> None:
    """One began each job, and the other took it over."""
    kept = [
        JobRecord(number=number, name=f"a{number}", uid=UID, runs=(f"r{number}",), command="", started_utc=0.0, boot="")
        for number in range(1, MAX_ALIVE_OF_USER + 1)
    ]
    JobFile(tmp_path).save(len(kept) + 1, kept)
    async with running(tmp_path) as node:
        with pytest.raises(HegmError, match=f"has {MAX_ALIVE_OF_USER} jobs") as refused:
            await registered(node, process.pid, "one more")
        assert refused.value.code is BUSY
        assert await registered(node, process.pid, "r7") == "j7"
        assert await registered(node, process.pid, "of another", uid=UID + 1)


async def test_a_full_disk_does_not_keep_a_job_from_its_name(tmp_path: Path, process: Child) -> None:
    (tmp_path / f".{NAME}.new").mkdir(parents=True)  # which no file can take the place of
    async with running(tmp_path) as node:
        assert await registered(node, process.pid, "one") == "j1"
        assert not (tmp_path / NAME).exists()
        with suppress(OSError):
            (tmp_path / f".{NAME}.new").rmdir()


async def test_a_job_is_found_by_its_last_runs_only(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        runs = [f"run{number}" for number in range(MAX_RUNS + 3)]
        for run in runs:
            assert await registered(node, process.pid, run) == "j1"
        found = [run for run in runs if node.moving.jobs.of_run(UID, run) is not None]
        assert found == runs[-MAX_RUNS:], "of the others nothing is kept"


async def test_a_script_below_a_folder_with_a_space_names_its_job(tmp_path: Path) -> None:
    """The job of `python3 "/home/a user/train.py"` was named `a`."""
    script = tmp_path / "a user" / "my train.py"
    script.parent.mkdir()
    script.write_text("print(flush=True); input()")
    async with running(tmp_path / "state") as node:
        with started(script, "--epochs", "5") as child:
            await node.attend(child.pid)
            await until(node, lambda: any(job.pid == child.pid for job in node.moving.jobs))
            (job,) = node.moving.jobs
            assert (job.name, job.command) == ("my-train", f"'{script}' --epochs 5")
            child.kill()


async def test_a_long_run_id_of_an_agent_is_cut(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid, run="x" * 9999)
        await until(node, lambda: any(job.members for job in node.moving.jobs))
        assert [job.runs for job in node.moving.jobs] == [("x" * MAX_RUN_CHARS,)]


@pytest.mark.thorough
async def test_a_name_requested_many_times_is_looked_up_once(tmp_path: Path, process: Child) -> None:
    calls: list[int | None] = []

    def may(uid: int | None) -> bool:
        calls.append(uid)
        return True

    async with running(tmp_path) as node:
        await registered(node, process.pid, "one")
        await node.attend(process.pid, run="one")
        assert await node.moving.job_requests.pids(["train"] * 1000, may) == (process.pid,)
        assert len(calls) < 10
        assert len(await node.moving.job_requests.jobs(["train"] * 1000, may, ended=False)) == 1
        assert len(calls) < 20


@pytest.mark.thorough
async def test_a_known_exit_status_is_not_replaced_by_that_of_another_process(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        with waiting_to_exit(7) as child:
            await registered(node, child.pid, "one")
            await node.attend(process.pid, run="one")
            assert child.stdin is not None
            child.stdin.close()
            await until(node, lambda: any(job.is_gone for job in node.moving.jobs))
        await node.attend(second_process.pid, token="b" * 32, run="one")
        await until(node, lambda: any(len(job.members) == 2 for job in node.moving.jobs))
        assert [(job.pid, job.status, job.is_alive) for job in node.moving.jobs] == [(child.pid, 7, True)]


async def test_how_jobs_of_other_users_ended_is_not_shown(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        for run in ("one", "two"):
            await ended_job(node, run, 3)
        with pytest.raises(HegmError, match=r"j1 \(ended\), j2 \(ended\) "):
            await node.moving.job_requests.one("train", owns_none)


async def test_a_hint_named_the_job_of_another_user(tmp_path: Path, process: Child) -> None:
    """A name of another user's job leads its reader to a job of his own, or to a refusal; the pid is what he saw."""
    async with running(tmp_path) as node:
        await registered(node, process.pid, "run-1", name="train")
        requests, hint = node.moving.job_requests, f"run: hegmctl suspend {process.pid}"
        assert requests.by_name(hint, mine) == "run: hegmctl suspend train"
        assert requests.by_name(hint, owns_none) == hint

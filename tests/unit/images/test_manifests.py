"""The description of the job in an image, and the operation that a restore makes of it."""

from __future__ import annotations

import json

import pytest

from hegmd.errors import HegmError
from hegmd.images.criu.needs import Needs
from hegmd.images.manifests import candidates_in, composed, is_of, meeting_in, needs_in, revived, start_ticks_in
from hegmd.migration.machine.operation import CHECKPOINT, ImageRequest, Operation
from hegmd.node.processes.process_tree import Tree, TreeProcess
from hegmd.protocol.images import ImageWorker, Manifest
from hegmd.protocol.snapshots import Gpu
from tests.unit.migration.operations import operation, worker

NEEDS = Needs(pids=(197, 300), dump_options=("--file-locks",))
TREE = Tree(197, (TreeProcess(197, 1, 7, "S", 197, 197, uid=1000), TreeProcess(300, 197, 8, "S", 197, 197, uid=1000)))


def gpu(name: str, uuid: str) -> Gpu:
    return Gpu(id=name, index=int(name[3:]), vendor="simulated", uuid=uuid, name="pretend", chip="one")


def handed() -> Operation:
    off = worker(
        "a", to=None, gpu=None, previous_gpu="gpu0", offloaded=True, is_parked=True, boundary=41, chip="one", rank=2
    )
    op = operation(off, kind=CHECKPOINT, image=ImageRequest(path="/images/one", uid=1000, gid=1000), created_utc=5.0)
    return op.replace(is_distributed=True)


def manifest() -> Manifest:
    worker = ImageWorker(pid=197, gpus=(), carrier=None, size_bytes=0, rest_bytes=0, bytes=(), agent_version="1")
    made = composed(
        handed(),
        [gpu("gpu0", "U-0"), gpu("gpu1", "U-1")],
        TREE,
        NEEDS,
        criu_version="4.2",
        meeting="/run/hegm/aside",
        attending={197: worker},
    )
    return Manifest.from_plain(json.loads(json.dumps(made.to_plain())), "manifest")


def test_the_operation_of_a_job_that_came_back_is_a_suspended_one_with_all_it_takes() -> None:
    op = revived(manifest(), "9", {197: 70}, [gpu("gpu5", "U-0")], 6.0)
    (member,) = op.workers
    before = handed().workers[0]
    assert (op.phase, op.is_distributed, op.owner_uid) == ("suspended", True, 1000)
    assert (member.start_ticks, member.token, member.rank) == (70, before.token, 2)
    assert (member.method, member.carrier, member.size_bytes) == (before.method, before.carrier, before.size_bytes)
    assert (member.offloaded, member.is_parked, member.needs_inspection, member.boundary) == (True, True, True, 41)
    assert (member.previous_gpu, member.first_gpu) == (
        "gpu5",
        "gpu5",
    )  # the same GPU by its UUID, whatever its current id


def test_dumped_processes_are_identified_by_pid_and_start_time() -> None:
    assert start_ticks_in(manifest()) == {member.pid: member.start_ticks for member in TREE.members}
    strange = manifest().replace(more={"start_ticks": [[1], [2, "3"], "45", [6, 7], [-1, 8], [1 << 40, 9]]})
    assert start_ticks_in(strange) == {6: 7}
    assert start_ticks_in(manifest().replace(more=None)) == {}


def test_a_gpu_name_is_not_trusted_on_a_node_without_that_gpu() -> None:
    """gpu0 of another node is another GPU."""
    (member,) = revived(manifest(), "9", {197: 70}, [gpu("gpu0", "another")], 6.0).workers
    assert (member.previous_gpu, member.first_gpu) == (None, None)


def test_the_map_for_another_node_has_all_gpus_with_its_own_first() -> None:
    """Without them the driver was given no map, and would have looked for a GPU that is on another node."""
    here = [gpu("gpu0", "GPU-0"), gpu("gpu1", "GPU-9")]
    made = manifest()
    all_gpus = [["gpu0", "GPU-1"], ["gpu1", "GPU-0"], ["gpu2", "amd"]]
    worker = made.workers[0].replace(gpus=("GPU-0",))
    made = made.replace(workers=(worker,), more={**(made.more or {}), "all_gpus": all_gpus})
    (member,) = revived(made, "9", {197: 70}, here, 6.0).workers
    assert (member.previous_gpu, member.first_gpu, member.source_gpu_uuids) == (None, "gpu0", ("GPU-0", "GPU-1"))
    here[1] = gpu("gpu1", "GPU-1")
    (member,) = revived(made, "9", {197: 70}, here, 6.0).workers
    assert (member.previous_gpu, member.source_gpu_uuids) == ("gpu0", ())


def test_another_image_of_the_same_path_does_not_count_as_the_one_in_progress() -> None:
    assert is_of(manifest(), handed())
    assert not is_of(manifest(), handed().replace(created_utc=6.0))
    assert not is_of(manifest(), handed().replace(id="2"))


def test_crius_needs_and_the_rendezvous_survive_the_manifest() -> None:
    assert needs_in(manifest()) == NEEDS
    assert meeting_in(manifest()) == "/run/hegm/aside"
    (candidate,) = candidates_in(manifest())
    assert candidate.agent is not None
    assert candidate.agent.token == handed().workers[0].token


@pytest.mark.parametrize("more", [None, {}, {"needs": {"pids": "x"}, "meeting": "aside"}])
def test_a_manifest_without_the_memory_needed_for_the_restore_is_refused(more: dict[str, object] | None) -> None:
    bare = manifest().replace(more=more)
    with pytest.raises(HegmError, match="what CRIU needs"):
        needs_in(bare)
    with pytest.raises(HegmError, match="where its agents wait"):
        meeting_in(bare)

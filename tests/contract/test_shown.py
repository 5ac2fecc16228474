"""Storages that another process copies: shown, freed, made again and filled, in video memory of the stub driver.

Each test is a function that runs in a process of its own, as an agent does, beside a pretend PyTorch; a failing assert
in there fails the test here. Longer than 400 lines because such a process finds its case by name in this module.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hegmd.agent import cuda_state, ipc_storages, transfer
from hegmd.agent.cuda_driver import Driver
from hegmd.agent.video_memory import VideoMemory
from hegmd.errors import HegmError
from hegmd.protocol.agents import NO_HANDLE
from tests.cells import in_one_test
from tests.stubs.cuda.node import CudaNode, order_in_force

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SIZES = (3 * MIB, 700, 5 * MIB)
# The segments that they are cut from, each on a stream of its own.
RESERVED_BYTES = (20 + 2 + 20) * MIB


class Job:
    """Storages with contents of their own in this process, and the pretend PyTorch that has them."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.start()
        self.contents = [bytes([number + 1]) * size_bytes for number, size_bytes in enumerate(SIZES)]
        self.storages = [self.torch.Storage(content, stream=7 * n) for n, content in enumerate(self.contents)]
        self.segments = cuda_state.Segments(self.torch)
        self.shown = ipc_storages.IpcStorages(self.storages, list(SIZES), self.segments)

    def cache(self, *sizes: int, stream: int = 0) -> Callable[[], None]:
        """Have a step's blocks of these sizes, all at once; what is given back does so again."""
        cuda = self.torch.cuda

        def step() -> None:
            blocks = [cuda.caching_allocator_alloc(size_bytes, device=0, stream=stream) for size_bytes in sizes]
            for block in blocks:
                cuda.caching_allocator_delete(block)

        step()
        self.segments = cuda_state.Segments(self.torch)  # its state on arrival, while it is parked
        self.shown = ipc_storages.IpcStorages(self.storages, list(SIZES), self.segments)
        return step

    def moved(self) -> None:
        self.shown.show()
        self.shown.free()
        assert self.torch.cuda.memory_reserved(0) == 0
        self.shown.make(None)
        self.shown.fill(0, len(SIZES))

    def hoard(self, but_for_bytes: int = 0) -> None:
        """Have another process allocate all free video memory except the given size."""
        size_bytes, address = 1 << 33, ctypes.c_uint64()
        while size_bytes >= MIB:
            is_there = self.free_bytes - size_bytes >= but_for_bytes
            if not is_there or self.torch.driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes)):
                size_bytes //= 2

    @property
    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert not self.torch.driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return free.value


def exports_each_storage_with_its_address(_state: Path) -> None:
    job = Job()
    snapshots = job.torch.cuda.snapshots
    view = job.shown.show()
    assert (len(view.handles), view.first, view.at_bytes, view.left) == (3, 0, 0, 0)
    assert view.spots == [(number, 0, size_bytes) for number, size_bytes in enumerate(SIZES)]
    assert job.shown.required_bytes == 8 * MIB + 1024
    assert job.torch.cuda.snapshots == snapshots, "the allocator was asked again for what had just been told"


def reports_the_gpu_of_each_storage(_state: Path) -> None:
    job = Job()
    assert (job.shown.show().gpus, job.shown.show().devices) == ([], b""), "there is one"
    job.storages[1].device = job.torch.Device("cuda", 1)
    job.shown = ipc_storages.IpcStorages(job.storages, list(SIZES), job.segments)
    both = [Driver().uuid_of(device) for device in (0, 1)]
    assert len(set(both)) == 2
    view = job.shown.show()
    assert (view.gpus, view.devices) == (both, b"\0\1\0")
    job.shown.free()
    view = job.shown.make(SIZES[0])
    assert (len(view.spots), view.gpus, view.devices) == (1, both, b"\0"), "the numbers stay in every round"


def frees_all_and_allocates_them_on_their_streams(_state: Path) -> None:
    job = Job()
    full_bytes = job.free_bytes
    job.shown.show()
    job.shown.free()
    assert (job.shown.out, [storage.data_ptr() for storage in job.storages]) == (True, [0, 0, 0])
    assert job.free_bytes >= full_bytes + RESERVED_BYTES
    job.shown.free()
    with pytest.raises(HegmError, match="its storages are already freed and cannot be exported"):
        job.shown.show()
    job.torch.cuda.made_on.clear()
    view = job.shown.make(None)
    assert (len(view.spots), view.left, job.shown.out) == (3, 0, True)
    assert job.torch.cuda.made_on == [0, 7, 14]
    assert len(job.shown.make(None).spots) == 3, "made and not filled is shown once more"
    assert job.torch.cuda.made_on == [0, 7, 14], "and not made once more"
    job.shown.fill(0, 2)
    assert job.shown.out
    job.shown.fill(2, 1)
    job.shown.fill(0, 3)
    assert not job.shown.out


def a_job_was_parked_while_its_agent_recorded_the_allocators_cache(_state: Path) -> None:
    """The report waited for it; now that is noted beside what the daemon does next, or when it is needed."""
    job = Job()
    job.cache(12 * MIB)
    before_bytes, snapshots = job.torch.cuda.memory_reserved(0), job.torch.cuda.snapshots
    job.shown.show()
    job.shown.free()
    assert job.torch.cuda.snapshots == snapshots
    job.shown.note_freed()
    job.shown.note_freed()
    assert job.torch.cuda.snapshots == snapshots + 1
    job.shown.make(None)
    job.shown.fill(0, len(SIZES))
    assert (job.torch.cuda.memory_reserved(0), job.shown.short_bytes) == (before_bytes, 0)
    assert job.torch.cuda.snapshots == snapshots + 1


def allocates_in_rounds_and_reports_where_each_round_begins(_state: Path) -> None:
    job = Job()
    job.shown.free()
    first = job.shown.make(3 * MIB + 2000)
    assert (first.first, first.at_bytes, len(first.spots), first.left) == (0, 0, 2, 1)
    with pytest.raises(HegmError, match="cannot be filled"):
        job.shown.fill(0, 3)
    job.shown.fill(0, 2)
    second = job.shown.make(1)
    assert (second.first, second.at_bytes, len(second.spots), second.left) == (2, 3 * MIB + 1024, 1, 0)
    job.shown.fill(2, 1)
    assert not job.shown.out


def reports_how_much_does_not_fit_and_keeps_nothing_allocated(state: Path) -> None:
    job = Job()
    job.shown.free()
    before_bytes = job.free_bytes
    _order(state, "error cuMemAlloc_v2 2 6")  # the third of those to come, and every one after that
    with pytest.raises(HegmError) as refused:
        job.shown.make(None)
    assert refused.value.facts == {"lacks_bytes": sum(SIZES)}
    assert "GPU" in refused.value.hint
    assert job.free_bytes == before_bytes
    _order(state, "")
    assert len(job.shown.make(None).spots) == 3


def frees_the_stacks_of_its_context_and_allocates_them_first(state: Path) -> None:
    job = Job()
    full_bytes = job.free_bytes
    job.shown.free()
    assert job.free_bytes == full_bytes + RESERVED_BYTES + 256 * MIB
    _order(state, "error cuCtxSetLimit 2")
    with pytest.raises(HegmError) as refused:
        job.shown.make(None)
    assert refused.value.facts == {"lacks_bytes": sum(SIZES)}, "a kernel without memory for its stack fails the job"
    _order(state, "")
    job.shown.make(None)
    assert job.free_bytes == full_bytes


def kept_the_storages_of_a_move_until_the_garbage_collector_ran(_state: Path) -> None:
    """A DDP training of 32 GiB had 8 GiB more on its GPU after each move: the gradients of its last step before."""
    job = Job()
    job.moved()
    known = [weakref.ref(storage) for storage in job.storages]
    gc.disable()
    del job.storages, job.shown
    assert [storage() for storage in known] == [None] * len(SIZES)


def leaves_the_stacks_of_a_script_that_requested_more(_state: Path) -> None:
    job = Job()
    assert not job.torch.driver.cuCtxSetLimit(0, ctypes.c_size_t(4096))
    full_bytes = job.free_bytes
    job.shown.free()
    assert job.free_bytes - full_bytes == RESERVED_BYTES
    kept_bytes = ctypes.c_size_t()
    assert not job.torch.driver.cuCtxGetLimit(ctypes.byref(kept_bytes), 0)
    assert kept_bytes.value == 4096


def does_not_report_missing_memory_after_another_failure(state: Path) -> None:
    job = Job()
    job.shown.free()
    _order(state, "error cuCtxSynchronize 700")
    with pytest.raises(HegmError) as refused:
        job.shown.make(None)
    assert refused.value.facts == {}


def queries_each_segment_once_until_the_thread_has_parked(state: Path) -> None:
    job = Job()
    showable = cuda_state.ExportableSegments()

    def requested() -> int:
        return (state / "log").read_text().count("cuIpcGetMemHandle")

    assert not showable.hidden(job.torch, job.segments.all)
    assert requested() == 3
    assert not showable.hidden(job.torch, job.segments.all)
    assert requested() == 3, "asked again within a downtime"
    more = job.torch.Storage(b"more")
    assert not showable.hidden(job.torch, cuda_state.Segments(job.torch).all)
    assert requested() == 4
    showable.forget()
    _order(state, "error cuIpcGetMemHandle 1")  # as of memory that the driver restored
    assert showable.hidden(job.torch, job.segments.all) == job.segments.all
    assert more.content() == b"more"


def does_not_export_memory_that_the_driver_restored_although_it_gives_handles(state: Path) -> None:
    """On two H200 a handle was given, and opening it answered 800."""
    job = Job()
    showable = cuda_state.ExportableSegments()
    assert not showable.hidden(job.torch, job.segments.all)
    showable.note_restored([(segment.address, segment.size_bytes) for segment in job.segments.all])
    showable.forget()
    assert showable.hidden(job.torch, job.segments.all) == job.segments.all
    job.shown.free()
    job.shown.make(None)
    fresh = [segment for segment in cuda_state.Segments(job.torch).all if segment not in job.segments.all]
    assert len(fresh) == 3


def knows_the_stream_and_the_owner_of_every_address(_state: Path) -> None:
    job = Job()
    for number, storage in enumerate(job.storages):
        last = storage.data_ptr() + SIZES[number] - 1
        assert job.segments.stream_of(storage.data_ptr()) == job.segments.stream_of(last) == 7 * number
    assert job.segments.stream_of(1) == 0
    assert job.segments.allocator == "native"
    assert not job.segments.graphs
    assert not job.segments.expandable


def has_its_cache_after_a_move_although_others_take_all_free_memory(_state: Path) -> None:
    """On two H200 a job was moved well and died at its next step: 32 MiB that it had cached were a hoarder's."""
    job = Job()
    takes = job.cache(64 * MIB, 32 * MIB, 12 * MIB, MIB, 700)
    before_bytes = job.torch.cuda.memory_reserved(0)
    job.moved()
    assert job.torch.cuda.memory_reserved(0) == before_bytes
    assert job.shown.short_bytes == 0
    job.hoard()
    takes()
    assert job.torch.cuda.memory_reserved(0) == before_bytes


def has_the_gaps_between_its_storages_on_their_streams(_state: Path) -> None:
    """The next step's blocks were cut from the segments that the storages were cut from as well."""
    job = Job()
    takes = job.cache(14 * MIB, stream=14), job.cache(16 * MIB, 20 * MIB, stream=0), job.cache(MIB, 700, stream=7)
    before_bytes = job.torch.cuda.memory_reserved(0)
    job.moved()
    job.hoard()
    for take in takes:
        take()
    assert job.torch.cuda.memory_reserved(0) == before_bytes


def allocates_its_cache_with_the_first_round_and_puts_no_storage_there(_state: Path) -> None:
    """The reservation passes to the process in the first round; memory that is free by the last round may belong to
    another process.
    """
    job = Job()
    takes = job.cache(64 * MIB)
    before_bytes = job.torch.cuda.memory_reserved(0)
    job.shown.show()
    job.shown.free()
    assert job.shown.make(3 * MIB).left == 2
    assert job.torch.cuda.memory_reserved(0) >= 64 * MIB
    job.shown.fill(0, 1)
    assert job.shown.make(None).left == 0
    job.shown.fill(1, 2)
    job.hoard()
    takes()
    assert job.torch.cuda.memory_reserved(0) == before_bytes


def allocates_what_fits_of_the_cache_and_reports_the_rest(state: Path) -> None:
    """The storages go before, and an allocation that would fail is not tried: a script may observe those."""
    job = Job()
    job.cache(64 * MIB, 32 * MIB)
    job.shown.show()
    job.shown.free()
    job.hoard(but_for_bytes=RESERVED_BYTES + 256 * MIB + 50 * MIB)
    tried = (state / "log").read_text().count("cuMemAlloc_v2")
    assert len(job.shown.make(None).spots) == 3
    assert job.shown.short_bytes == 46 * MIB
    assert job.torch.cuda.memory_reserved(0) == RESERVED_BYTES + 50 * MIB
    assert (state / "log").read_text().count("cuMemAlloc_v2") == tried + 4
    job.shown.fill(0, 3)
    assert [storage.size_bytes for storage in job.storages] == list(SIZES)


def frees_all_of_it_at_the_next_offload(_state: Path) -> None:
    """Its rollback left the GPU again, and the driver would have carried what was allocated by then."""
    job = Job()
    takes = job.cache(64 * MIB)
    before_bytes = job.torch.cuda.memory_reserved(0)
    job.shown.show()
    job.shown.free()
    job.shown.make(3 * MIB)
    job.shown.free()
    assert job.torch.cuda.memory_reserved(0) == 0
    job.shown.make(None)
    job.shown.fill(0, 3)
    job.hoard()
    takes()
    assert job.torch.cuda.memory_reserved(0) == before_bytes


def copies_them_itself_and_has_its_cache(state: Path) -> None:
    """As it does where CUDA IPC cannot show its memory."""
    job = Job()
    takes = job.cache(64 * MIB, 32 * MIB)
    before_bytes = job.torch.cuda.memory_reserved(0)
    with (state.parent / "pool").open("w+b") as pool:
        os.truncate(pool.fileno(), transfer.required_bytes(list(SIZES)))
        out = transfer.offload(os.dup(pool.fileno()), job.storages, list(SIZES), lambda _: None)
        assert job.torch.cuda.memory_reserved(0) == 0
        out.bring_back(out.fd, lambda _: None)
        out.close()
    assert [storage.content() for storage in job.storages] == job.contents
    assert (job.torch.cuda.memory_reserved(0), out.short_bytes) == (before_bytes, 0)
    job.hoard()
    takes()


def frees_the_stacks_of_its_context_as_well_if_it_copies_them_itself(state: Path) -> None:
    """The driver's checkpoint of such a move took 0.1 s longer than that of one whose storages the helper copied."""
    job = Job()
    full_bytes = job.free_bytes
    with (state.parent / "pool").open("w+b") as pool:
        os.truncate(pool.fileno(), transfer.required_bytes(list(SIZES)))
        out = transfer.offload(os.dup(pool.fileno()), job.storages, list(SIZES), lambda _: None)
        assert job.free_bytes == full_bytes + RESERVED_BYTES + 256 * MIB
        _order(state, "error cuCtxSetLimit 2")
        with pytest.raises(HegmError):
            out.bring_back(out.fd, lambda _: None)
        assert job.free_bytes == full_bytes + RESERVED_BYTES + 256 * MIB, "its storages are out as before"
        _order(state, "")
        out.bring_back(out.fd, lambda _: None)
        out.close()
    assert job.free_bytes == full_bytes
    assert [storage.content() for storage in job.storages] == job.contents


def copies_them_itself_through_pinned_memory(state: Path) -> None:
    """Its own copies of 32 GiB through memory that was not pinned took 8.5 s of a move."""
    _carried_through_a_ring(state)
    calls = (state / "log").read_text()
    assert calls.count("cuMemcpyDtoHAsync") == calls.count("cuMemcpyHtoDAsync") >= len(SIZES)
    assert calls.count("cuMemHostRegister") == calls.count("cuMemHostUnregister") == 2, "nothing stays pinned"
    assert calls.count("cuStreamCreate") == calls.count("cuStreamDestroy") > 1


def copies_them_without_pinned_memory_if_the_driver_refuses_a_part_of_it(state: Path) -> None:
    for name in ("cuMemHostRegister_v2 304", "cuStreamCreate 2", "cuMemcpyDtoHAsync_v2 1", "cuMemcpyHtoDAsync_v2 1"):
        order_in_force(state, f"error {name}")
        _carried_through_a_ring(state)


def raises_the_fault_of_the_descriptor_and_does_not_copy_again(state: Path) -> None:
    job = Job()
    medium = VideoMemory(job.storages, ring_from_bytes=0)
    spans = [(storage.data_ptr(), 0, storage.nbytes()) for storage in job.storages]

    nowhere = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(OSError, match="No space left"):
        medium.copy_out(nowhere, sum(SIZES), spans, lambda _: None)
    os.close(nowhere)
    with (state.parent / "pool").open("w+b") as pool, pytest.raises(OSError, match="ends"):
        medium.copy_in(pool.fileno(), spans, lambda _: None)
    assert "cuMemcpyDtoH_v2" not in (state / "log").read_text()


def _carried_through_a_ring(state: Path) -> None:
    job = Job()
    medium = VideoMemory(job.storages, ring_from_bytes=0)
    places = [1000, 2 * sum(SIZES), 3 * sum(SIZES) + 1]
    spans = [(storage.data_ptr(), place, storage.nbytes()) for storage, place in zip(job.storages, places, strict=True)]
    with (state.parent / "pool").open("w+b") as pool:
        os.truncate(pool.fileno(), 5 * sum(SIZES))
        medium.copy_out(pool.fileno(), 5 * sum(SIZES), spans, lambda _: None)
        for content, place in zip(job.contents, places, strict=True):
            assert os.pread(pool.fileno(), len(content), place) == content
        for storage in job.storages:
            storage.overwrite(bytes(storage.nbytes()))
        medium.copy_in(pool.fileno(), spans, lambda _: None)
    assert [storage.content() for storage in job.storages] == job.contents


def knows_the_offloaded_storages_if_freeing_the_cache_fails(state: Path) -> None:
    """The storages were freed, the order failed, and no record said that they were offloaded."""
    job = Job()
    job.cache(64 * MIB)
    with (state.parent / "pool").open("w+b") as pool:
        os.truncate(pool.fileno(), transfer.required_bytes(list(SIZES)))
        fails = job.torch.cuda.fails
        fails.add("empty_cache")
        out = transfer.offload(os.dup(pool.fileno()), job.storages, list(SIZES), lambda _: None)
        fails.clear()
        assert [storage.data_ptr() for storage in job.storages] == [0, 0, 0]
        out.bring_back(out.fd, lambda _: None)
        out.close()
    assert [storage.content() for storage in job.storages] == job.contents


def allocates_the_cache_in_one_piece_if_its_allocator_reports_nothing(_state: Path) -> None:
    """A survey then failed with an error after the storages were freed."""
    job = Job()
    job.cache(64 * MIB, 32 * MIB)
    before_bytes = job.torch.cuda.memory_reserved(0)
    job.torch.cuda.fails.add("memory_snapshot")
    job.moved()
    assert (job.torch.cuda.memory_reserved(0), job.shown.short_bytes) == (before_bytes, 0)


def copies_storages_next_to_memory_that_stays_itself(state: Path) -> None:
    """Issue 14, row 1: cuDNN has memory in a segment, so storages return into memory that no process can open."""
    job = Job()
    unseen = job.torch.cuda.caching_allocator_alloc(3 * MIB, device=0, stream=14)
    segments, showable = cuda_state.Segments(job.torch), cuda_state.ExportableSegments()
    places = [(storage.data_ptr(), storage.nbytes()) for storage in job.storages]
    own = segments.own(job.torch, showable, places)
    assert [cuda_state.within(own, address) for address, _ in places] == [False, False, True]
    job.shown = ipc_storages.IpcStorages(job.storages, list(SIZES), segments, own)
    assert [spot[0] for spot in job.shown.show(partly=True).spots] == [0, 1, NO_HANDLE]
    room = os.memfd_create("room")
    os.truncate(room, 8 * MIB)
    spans = [(2, 0, MIB, 64), (2, MIB, 4 * MIB, 64 + MIB)]
    job.shown.copy("out", room, spans, lambda _: None)
    assert os.pread(room, SIZES[2], 64) == job.contents[2]
    job.shown.free()
    with pytest.raises(HegmError, match="cannot be copied out"):
        job.shown.copy("out", room, spans, lambda _: None)
    assert [spot[0] for spot in job.shown.make(None, partly=True).spots] == [0, 1, NO_HANDLE]
    job.shown.copy("in", room, spans, lambda _: None)
    assert job.storages[2].content() == job.contents[2]
    job.shown.fill(0, len(SIZES))
    showable.note_restored(job.shown.left)
    hidden = showable.hidden(job.torch, cuda_state.Segments(job.torch).all)
    assert [segment.stream for segment in hidden] == [14], "and no other segment is taken for one that was restored"
    job.torch.cuda.caching_allocator_delete(unseen)
    os.close(room)


def exports_no_handle_where_the_driver_gives_none(state: Path) -> None:
    """Issue 14, row 1: the storages were made, the order failed, and so did every one after it."""
    job = Job()
    job.shown.show()
    job.shown.free()
    _order(state, "error cuIpcGetMemHandle 1")
    assert [spot[0] for spot in job.shown.make(None, partly=True).spots] == [NO_HANDLE] * 3
    with pytest.raises(HegmError, match="cuIpcGetMemHandle"):
        job.shown.make(None)


def _order(state: Path, line: str) -> None:
    """The one order in force; empty for none."""
    lines = [kept for kept in (state / "scenario").read_text().splitlines() if not kept.startswith("error ")]
    fresh = state / "scenario.new"
    fresh.write_text("\n".join([*lines, line]) + "\n")
    os.replace(fresh, state / "scenario")


CASES: dict[str, Callable[[Path], None]] = {
    case.__name__: case
    for case in (
        exports_each_storage_with_its_address,
        frees_all_and_allocates_them_on_their_streams,
        allocates_in_rounds_and_reports_where_each_round_begins,
        reports_how_much_does_not_fit_and_keeps_nothing_allocated,
        does_not_export_memory_that_the_driver_restored_although_it_gives_handles,
        frees_the_stacks_of_its_context_and_allocates_them_first,
        kept_the_storages_of_a_move_until_the_garbage_collector_ran,
        leaves_the_stacks_of_a_script_that_requested_more,
        does_not_report_missing_memory_after_another_failure,
        queries_each_segment_once_until_the_thread_has_parked,
        knows_the_stream_and_the_owner_of_every_address,
        has_its_cache_after_a_move_although_others_take_all_free_memory,
        has_the_gaps_between_its_storages_on_their_streams,
        allocates_its_cache_with_the_first_round_and_puts_no_storage_there,
        allocates_what_fits_of_the_cache_and_reports_the_rest,
        frees_all_of_it_at_the_next_offload,
        copies_them_itself_and_has_its_cache,
        frees_the_stacks_of_its_context_as_well_if_it_copies_them_itself,
        copies_them_itself_through_pinned_memory,
        copies_them_without_pinned_memory_if_the_driver_refuses_a_part_of_it,
        raises_the_fault_of_the_descriptor_and_does_not_copy_again,
        knows_the_offloaded_storages_if_freeing_the_cache_fails,
        allocates_the_cache_in_one_piece_if_its_allocator_reports_nothing,
        copies_storages_next_to_memory_that_stays_itself,
        exports_no_handle_where_the_driver_gives_none,
    )
}


@in_one_test(
    ("sizes", "taken_mib"),
    [
        ([], 0),
        ([700, 4], 2),
        ([1 << 20] * 3, 4),
        ([3 * MIB, 700, 5 * MIB], 22),
        ([7 * MIB] * 3, 40),
        ([10 * MIB, 11 * MIB - 1], 22),
        ([1 << 30, 8 * MIB, 384], 1046),
    ],
)
def test_memory_that_the_allocator_takes_for_storages(sizes: list[int], taken_mib: int) -> None:
    """Room for 1,032.2 MiB of storages was held, and the 1,046 that PyTorch takes for them were a hoarder's by then."""
    assert cuda_state.padding_bytes(sizes) + sum(sizes) == taken_mib * MIB


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_exported_storages(case: str, tmp_path: Path) -> None:
    node = CudaNode.make(tmp_path / "node")
    environ = {**os.environ, **node.environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/stubs/framework'}"}
    words = [sys.executable, "-m", "tests.contract.test_shown", case, str(node.state)]
    ran = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))

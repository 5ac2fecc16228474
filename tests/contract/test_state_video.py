"""A state's bytes from video memory into its file and back, through pinned memory of the stub driver.

Each case runs in a process of its own, beside a pretend PyTorch; a failing assert in there fails the test here.
Longer than 400 lines because such a process finds all cases in one module.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import subprocess
import sys
from _thread import start_new_thread
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from hegmd.agent import copying, pinned_buffers
from hegmd.agent.cuda_driver import Copies
from hegmd.agent.state.storage import checksums, raw_copy, shadow
from hegmd.errors import HegmError
from tests.gpu import leave_room
from tests.patience import HANG_S
from tests.stubs.cuda.node import CudaNode, order_in_force

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
CONTEXT_BYTES = CudaNode.context_bytes
# Less than a page, on no border, more than one part, several parts.
SIZES = (700, 4096, 8 * (1 << 20) + 4099, 21 * (1 << 20))


class Tensor:
    """The parts of a tensor that the code reads when only bytes matter."""

    dtype = "uint8"

    def __init__(self, address: int, size_bytes: int, device: Any) -> None:
        self._address = address
        self.shape = (size_bytes,)
        self.device = device

    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int]:
        return (1,)

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj


class Device:
    def __init__(self, kind: str, index: int | None = None) -> None:
        self.type = kind
        self._index = index

    def __str__(self) -> str:
        return self.type if self._index is None else f"{self.type}:{self._index}"


CPU, GPU = Device("cpu"), Device("cuda", 0)


def _job() -> Any:
    torch: Any = importlib.import_module("torch")
    torch.start()
    return torch


def _content(size_bytes: int, seed: int) -> bytes:
    return bytes((seed + number) & 0xFF for number in range(251)) * (size_bytes // 251 + 1)


def _raws(torch: Any, fd: int) -> tuple[list[bytes], list[Any], list[int]]:
    contents = [_content(size, size)[:size] for size in SIZES]
    storages = [torch.Storage(content) for content in contents]
    raws = [
        (storage, storage.data_ptr(), len(content), "cuda:0")
        for storage, content in zip(storages, contents, strict=True)
    ]
    host = ctypes.create_string_buffer(b"host memory", 11)
    raws.append((host, ctypes.addressof(host), 11, "cpu"))
    contents.append(b"host memory")
    places = [copying.PAGE_BYTES * 3 + sum(copying.round_up(size) for size in SIZES[:n]) for n in range(len(raws))]
    os.ftruncate(fd, 64 << 20)
    return contents, raws, places


def _out(torch: Any, fd: int) -> tuple[list[bytes], list[int], dict[int, int]]:
    contents, raws, places = _raws(torch, fd)
    found: dict[int, int] = {}
    raw_copy.copy_pieces_out(fd, 64 << 20, raws, places, found, copying.ignore)
    return contents, places, found


def _see_the_file(out: tuple[list[bytes], list[int], dict[int, int]], fd: int) -> None:
    contents, places, found = out
    for content, place in zip(contents, places, strict=True):
        assert os.pread(fd, len(content), place) == content
        for start in range(0, len(content), copying.PIECE_BYTES):
            part = ctypes.create_string_buffer(content[start : start + copying.PIECE_BYTES])
            assert found.pop(place + start) == checksums.sum_of(ctypes.addressof(part), len(part) - 1)
    assert found == {}


def _order(state: Path, *lines: str) -> None:
    for line in lines:
        order_in_force(state, line)


def _file(state: Path) -> int:
    return os.open(state / "file", os.O_RDWR | os.O_CREAT)


def writes_video_and_host_memory_with_their_checksums(state: Path) -> None:
    torch, fd = _job(), _file(state)
    _see_the_file(_out(torch, fd), fd)
    assert torch.cuda.summed == 2, "the GPU adds up what is large"


def adds_up_by_itself_where_the_gpu_cannot(state: Path) -> None:
    """Nothing is left without a checksum where there is no room for the sums."""
    torch, fd = _job(), _file(state)
    torch.cuda.fails.add("sum")
    _see_the_file(_out(torch, fd), fd)


def adds_up_in_memory_that_pytorch_has_kept(state: Path) -> None:
    """A job has all memory of the GPU, and does not use all of it: the processor added up, at half of the speed."""
    torch, fd = _job(), _file(state)
    contents, raws, places = _raws(torch, fd)
    _order(state, "error cuMemAlloc_v2 2")
    found: dict[int, int] = {}
    raw_copy.copy_pieces_out(fd, 64 << 20, raws, places, found, copying.ignore)
    _see_the_file((contents, places, found), fd)
    assert torch.cuda.summed == 2


def adds_up_adjacent_tensors_in_one_call(state: Path) -> None:
    """Each call of PyTorch takes as long as the copy of a megabyte; the second tensor ends within a page."""
    torch, fd = _job(), _file(state)
    sizes = (2 * MIB, 9 * MIB + 700, 3 * MIB)
    starts = (0, 2 * MIB, 12 * MIB)
    content = _content(16 * MIB, 7)[: 16 * MIB]
    storage = torch.Storage(content)
    raws = [(storage, storage.data_ptr() + start, size, "cuda:0") for start, size in zip(starts, sizes, strict=True)][
        ::-1
    ]
    places = [copying.PAGE_BYTES + (number << 24) for number in range(3)]
    os.ftruncate(fd, 64 << 20)
    found: dict[int, int] = {}
    raw_copy.copy_pieces_out(fd, 64 << 20, raws, places, found, copying.ignore)
    contents = [content[start : start + size] for start, size in zip(starts, sizes, strict=True)][::-1]
    _see_the_file((contents, places, found), fd)
    assert torch.cuda.summed == 2


def copies_where_nothing_can_be_pinned(state: Path) -> None:
    torch, fd = _job(), _file(state)
    _order(state, "error cuMemHostRegister_v2 304")
    _see_the_file(_out(torch, fd), fd)
    _see_it_filled(torch)


def copies_where_no_stream_can_be_had(state: Path) -> None:
    torch, fd = _job(), _file(state)
    _order(state, "error cuStreamCreate 2")
    _see_the_file(_out(torch, fd), fd)
    _see_it_filled(torch)


def puts_many_small_pieces_in_one_slot(state: Path) -> None:
    """One wait for the GPU for all tensors that fit into a slot: a thousand of them needed a thousand waits."""
    torch = _job()
    storage = torch.Storage(bytes(1 << 20))
    raws = [(storage, storage.data_ptr() + 700 * number, 700, "cuda:0") for number in range(1000)]
    places = [copying.PAGE_BYTES + 1024 * number for number in range(1000)]
    fd = _file(state)
    os.ftruncate(fd, 2 << 20)
    found: dict[int, int] = {}
    raw_copy.copy_pieces_out(fd, 2 << 20, raws, places, found, copying.ignore)
    assert sorted(found) == places
    waits = [line for line in (state / "log").read_text().splitlines() if "cuStreamSynchronize" in line]
    assert 0 < len(waits) < 10


def leaves_no_pinned_memory_behind_where_a_copy_fails(state: Path) -> None:
    torch = _job()
    storage = torch.Storage(bytes(700))
    host = ctypes.create_string_buffer(700)
    pair = Tensor(ctypes.addressof(host), len(host), CPU), Tensor(storage.data_ptr(), len(host), GPU)
    _order(state, "error cuMemcpyHtoDAsync_v2 700", "error cuMemcpyDtoHAsync_v2 700")
    with pytest.raises(HegmError, match="cuMemcpyHtoDAsync answered 700"):
        raw_copy.fill([pair])
    with pytest.raises(HegmError, match="cuMemcpyDtoHAsync answered 700"):
        _out(torch, _file(state))
    calls = (state / "log").read_text()
    assert calls.count("cuMemHostRegister") == calls.count("cuMemHostUnregister") > 1
    assert calls.count("cuStreamCreate") == calls.count("cuStreamDestroy") > 1


def fills_video_memory(_state: Path) -> None:
    _see_it_filled(_job())


def pins_the_memory_that_was_prepared_and_no_other(state: Path) -> None:
    """Taken and pinned by each thread for itself, it took as long as the copies of 6 GiB."""
    torch = _job()
    pinned_buffers.prepare()
    _see_it_filled(torch)
    pinned_buffers.drop()
    calls = (state / "log").read_text()
    assert calls.count("cuMemHostRegister") == calls.count("cuMemHostUnregister") == 1


def _see_it_filled(torch: Any) -> None:
    contents = [_content(size, size)[:size] for size in SIZES]
    hosts = [ctypes.create_string_buffer(content, len(content)) for content in contents]
    storages = [torch.Storage(bytes(len(content))) for content in contents]
    pairs = [
        (Tensor(ctypes.addressof(host), size, CPU), Tensor(storage.data_ptr(), size, GPU))
        for host, storage, size in zip(hosts, storages, SIZES, strict=True)
    ]
    raw_copy.fill(pairs)
    assert [storage.content() for storage in storages] == contents


def _shadowed(fd: int, raws: list[Any], places: list[int], found: dict[int, int]) -> shadow.Shadows | None:
    return raw_copy.copy_pieces_out(fd, 64 << 20, raws, places, found, copying.ignore, with_shadow=True)


def fetches_a_shadow_of_what_the_training_has_changed_since(state: Path) -> None:
    """In another thread; the memory is given back then."""
    torch, fd = _job(), _file(state)
    contents, raws, places = _raws(torch, fd)
    found: dict[int, int] = {}
    shadows = _shadowed(fd, raws, places, found)
    assert shadows is not None
    for storage, *_ in raws[:-1]:
        storage.overwrite(bytes(storage.nbytes()))
    free_bytes = torch.cuda.mem_get_info(0)[0]
    with ThreadPoolExecutor(1) as threads:
        threads.submit(shadows.fetch, fd, 64 << 20, found, lambda: False).result()
    _see_the_file((contents, places, found), fd)
    assert torch.cuda.mem_get_info(0)[0] - free_bytes >= sum(SIZES)
    assert torch.cuda.summed == 1, "the GPU adds up all pages at once"


def adds_up_a_shadow_by_itself_where_the_gpu_cannot(state: Path) -> None:
    torch, fd = _job(), _file(state)
    contents, raws, places = _raws(torch, fd)
    torch.cuda.fails.add("sum")
    found: dict[int, int] = {}
    shadows = _shadowed(fd, raws, places, found)
    assert shadows is not None
    shadows.fetch(fd, 64 << 20, found, lambda: False)
    _see_the_file((contents, places, found), fd)


def uses_memory_that_was_allocated_ahead_if_it_is_large_enough(state: Path) -> None:
    torch, fd = _job(), _file(state)
    contents, raws, places = _raws(torch, fd)
    free_bytes = torch.cuda.mem_get_info(0)[0]
    for first, allocations in ((2, 1), (3, 0), (0, 1), (0, 0)):
        shadow.prepare()
        shadow.wait_for_memory()
        before = _count(state, "cuMemAlloc_v2")
        found: dict[int, int] = {}
        shadows = _shadowed(fd, raws[first:], places[first:], found)
        assert shadows is not None
        assert _count(state, "cuMemAlloc_v2") - before == allocations
        shadow.drop()
        shadows.fetch(fd, 64 << 20, found, lambda: False)
        _see_the_file((contents[first:], places[first:], found), fd)
        assert torch.cuda.mem_get_info(0)[0] == free_bytes
    shadow.prepare()
    shadow.drop()
    assert torch.cuda.mem_get_info(0)[0] == free_bytes, "a snapshot that was refused keeps no memory"


def _count(state: Path, call: str) -> int:
    return sum(call in line for line in (state / "log").read_text().splitlines())


def _leave_room(torch: Any, room_bytes: int) -> Any:
    """Allocate all of the GPU except the share that stays free for the job, and `room_bytes` for a shadow."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    taken = torch.Storage(bytes(1))
    taken.resize_((free_bytes - int(total_bytes * shadow.SHARE_LEFT_FREE) - room_bytes) // MIB * MIB)
    return taken


def makes_no_shadow_that_would_leave_the_job_little_room(state: Path) -> None:
    """All is written while the training waits, and no memory of the GPU stays allocated."""
    torch, fd = _job(), _file(state)
    contents, raws, places = _raws(torch, fd)
    taken = _leave_room(torch, 7 * MIB)
    free_bytes = torch.cuda.mem_get_info(0)[0]
    found: dict[int, int] = {}
    assert _shadowed(fd, raws, places, found) is None
    _see_the_file((contents, places, found), fd)
    assert torch.cuda.mem_get_info(0)[0] == free_bytes
    taken.resize_(0)
    torch.cuda.empty_cache()
    _order(state, "error cuMemAlloc_v2 2")
    found = {}
    assert _shadowed(fd, raws, places, found) is None
    _see_the_file((contents, places, found), fd)


def makes_a_shadow_of_as_many_pieces_as_there_is_room_for(state: Path) -> None:
    """The smallest first, and of the last one whole parts; the others are written while the training waits."""
    torch, fd = _job(), _file(state)
    contents, raws, places = _raws(torch, fd)
    free_bytes = torch.cuda.mem_get_info(0)[0]
    sizes = sorted(SIZES)
    # The parts that are written at once, by how many parts there is room for; only the tensor of 21 MiB is split.
    at_once_bytes = {1: sizes[2] + sizes[3], 2: sizes[3], 3: sizes[3] - (8 << 20), 4: 0}
    for parts, expected_bytes in at_once_bytes.items():
        taken = _leave_room(torch, parts * (8 * MIB + MIB // 2))
        os.pwrite(fd, bytes(64 << 20), 0)
        left_bytes = torch.cuda.mem_get_info(0)[0]
        found: dict[int, int] = {}
        shadow.prepare()
        shadows = _shadowed(fd, raws, places, found)
        assert shadows is not None
        shadow.drop()
        assert torch.cuda.mem_get_info(0)[0] >= torch.cuda.mem_get_info(0)[1] * shadow.SHARE_LEFT_FREE
        written = [
            place + start for place, size in zip(places, SIZES, strict=False) for start in range(0, size, 8 << 20)
        ]
        assert sum(_part_bytes(places, place) for place in written if place in found) == expected_bytes, parts
        for (storage, *_), content in zip(raws[:-1], contents, strict=False):
            storage.overwrite(bytes(len(content)))
        shadows.fetch(fd, 64 << 20, found, lambda: False)
        _see_the_file((contents, places, found), fd)
        assert torch.cuda.mem_get_info(0)[0] == left_bytes
        for (storage, *_), content in zip(raws[:-1], contents, strict=False):
            storage.overwrite(content)
        taken.resize_(0)
        torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(0)[0] == free_bytes


def _part_bytes(places: list[int], part: int) -> int:
    """Return the size of the part at that place."""
    return next(
        min(copying.PIECE_BYTES, place + size - part)
        for place, size in zip(places, SIZES, strict=False)
        if place <= part < place + size
    )


def uses_more_memory_once_the_job_has_freed_some(state: Path) -> None:
    """The memory that was allocated ahead for the last shadow is smaller than the room that there is now."""
    torch, fd = _job(), _file(state)
    contents, raws, places = _raws(torch, fd)
    taken = _leave_room(torch, 9 * MIB)
    found: dict[int, int] = {}
    shadows = _shadowed(fd, raws, places, found)
    assert shadows is not None
    assert len(found) > 0
    taken.resize_(0)
    torch.cuda.empty_cache()  # while the shadow is there
    free_bytes = torch.cuda.mem_get_info(0)[0]
    shadows.fetch(fd, 64 << 20, found, lambda: False)
    _see_the_file((contents, places, found), fd)
    taken = _leave_room(torch, 9 * MIB)
    shadow.prepare()
    shadow.wait_for_memory()
    taken.resize_(0)
    torch.cuda.empty_cache()
    found = {}
    shadows = _shadowed(fd, raws, places, found)
    shadow.drop()
    assert shadows is not None
    assert found == {}, "all of it is in the shadow"
    shadows.fetch(fd, 64 << 20, found, lambda: False)
    _see_the_file((contents, places, found), fd)
    assert torch.cuda.mem_get_info(0)[0] > free_bytes


def makes_no_shadow_where_another_process_takes_the_memory_meanwhile(state: Path) -> None:
    """The room was there when it was looked for, and was not there once the shadow had its memory."""
    torch, fd = _job(), _file(state)
    contents, raws, places = _raws(torch, fd)
    taken = _leave_room(torch, 20 * MIB)
    fifo = state / "held"
    os.mkfifo(fifo)
    calls = _count(state, "cuMemAlloc_v2")
    _order(state, f"hold cuMemAlloc_v2 {fifo} {calls + 1} {calls + 1}")
    found: dict[int, int] = {}
    with ThreadPoolExecutor(1) as threads:
        context = Copies().context()
        snapshot = threads.submit(_in_context, context, partial(_shadowed, fd, raws, places, found))
        with fifo.open("wb"):  # once the agent allocates
            other = torch.Storage(bytes(1))
            other.resize_(int(torch.cuda.mem_get_info(0)[1] * shadow.SHARE_LEFT_FREE) // MIB * MIB)
        assert snapshot.result() is None
    _see_the_file((contents, places, found), fd)
    assert other.nbytes() > 0
    assert taken.nbytes() > 0


def _in_context(context: int | None, work: Callable[[], Any]) -> Any:
    Copies().use(context)
    return work()


def gives_two_ranks_on_one_gpu_whole_snapshots(state: Path) -> None:
    """Both look for room at the same boundary, and the GPU has room for one and a half."""
    torch = _job()
    storages_bytes = 46 * MIB  # by the segments of PyTorch
    taken = _leave_room(torch, 2 * (CONTEXT_BYTES + storages_bytes) + sum(SIZES) * 3 // 2)
    words = [sys.executable, "-m", "tests.contract.test_state_video", "a_rank", str(state)]
    ranks = [subprocess.Popen([*words, str(rank)]) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert taken.nbytes() > 0


def a_rank(state: Path) -> None:
    torch, fd = _job(), os.open(state / f"file{sys.argv[3]}", os.O_RDWR | os.O_CREAT)
    contents, raws, places = _raws(torch, fd)
    for number in range(3):
        found: dict[int, int] = {}
        shadow.prepare()
        shadows = _shadowed(fd, raws, places, found)
        shadow.drop()
        for (storage, *_), content in zip(raws[:-1], contents, strict=False):
            storage.overwrite(bytes(len(content)))
        if shadows is not None:
            shadows.fetch(fd, 64 << 20, found, lambda: False)
        _see_the_file((contents, places, found), fd)
        contents[:-1] = [_content(size, size + number)[:size] for size in SIZES]
        for (storage, *_), content in zip(raws[:-1], contents, strict=False):
            storage.overwrite(content)


def writes_nothing_more_once_a_copy_of_a_shadow_fails(state: Path) -> None:
    """The part that the training waited for is written by then; the shadow's memory is freed."""
    torch, fd = _job(), _file(state)
    _contents, raws, places = _raws(torch, fd)
    _leave_room(torch, 9 * MIB)
    free_bytes = torch.cuda.mem_get_info(0)[0]
    found: dict[int, int] = {}
    shadows = _shadowed(fd, raws, places, found)
    assert shadows is not None
    _order(state, "error cuMemcpyDtoHAsync_v2 700")
    with pytest.raises(HegmError, match="cuMemcpyDtoHAsync answered 700"):
        shadows.fetch(fd, 64 << 20, found, lambda: False)
    assert torch.cuda.mem_get_info(0)[0] == free_bytes
    calls = (state / "log").read_text()
    assert calls.count("cuMemHostRegister") == calls.count("cuMemHostUnregister") == 2
    assert calls.count("cuStreamCreate") == calls.count("cuStreamDestroy")


def gives_a_shadow_back_at_once_when_it_is_not_wanted_any_more(state: Path) -> None:
    torch, fd = _job(), _file(state)
    _contents, raws, places = _raws(torch, fd)
    free_bytes = torch.cuda.mem_get_info(0)[0]
    found: dict[int, int] = {}
    shadows = _shadowed(fd, raws, places, found)
    assert shadows is not None
    with pytest.raises(shadow.CopyStopped):
        shadows.fetch(fd, 64 << 20, found, lambda: True)
    shadows.close()
    shadows.close()
    assert torch.cuda.mem_get_info(0)[0] == free_bytes
    calls = (state / "log").read_text()
    assert calls.count("cuMemHostRegister") == calls.count("cuMemHostUnregister") == 1


def kept_the_staging_memory_of_a_fetch_that_failed_before_it_was_used(state: Path) -> None:
    """128 MiB until the next snapshot: the slot could not be written, and the bytes in host memory are the first."""
    torch, fd = _job(), _file(state)
    _contents, raws, places = _raws(torch, fd)
    pinned_buffers.prepare()
    shadows = _shadowed(fd, raws, places, {})
    assert shadows is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        shadows.fetch(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), 64 << 20, {}, lambda: False)
    assert pinned_buffers._ahead is None


def used_cuda_after_the_interpreter_ended_to_free_a_shadow(state: Path) -> None:
    """The script ends while its shadow is fetched: nothing but the end stops the copying."""
    torch, fd = _job(), _file(state)
    _contents, raws, places = _raws(torch, fd)
    free_bytes = torch.cuda.mem_get_info(0)[0]
    shadows = _shadowed(fd, raws, places, {})
    assert shadows is not None
    begun, ends = Event(), Event()

    def see() -> None:
        if torch.cuda.mem_get_info(0)[0] != free_bytes:
            os._exit(1)

    def is_over() -> bool:
        begun.set()
        return ends.wait(HANG_S)

    atexit.register(see)  # runs last
    start_new_thread(shadows.fetch, (fd, 64 << 20, {}, is_over))
    assert begun.wait(HANG_S)
    atexit.register(ends.set)  # runs first


CASES: dict[str, Callable[[Path], None]] = {
    case.__name__: case
    for case in (
        writes_video_and_host_memory_with_their_checksums,
        adds_up_by_itself_where_the_gpu_cannot,
        adds_up_in_memory_that_pytorch_has_kept,
        adds_up_adjacent_tensors_in_one_call,
        copies_where_nothing_can_be_pinned,
        copies_where_no_stream_can_be_had,
        puts_many_small_pieces_in_one_slot,
        leaves_no_pinned_memory_behind_where_a_copy_fails,
        fills_video_memory,
        pins_the_memory_that_was_prepared_and_no_other,
        fetches_a_shadow_of_what_the_training_has_changed_since,
        adds_up_a_shadow_by_itself_where_the_gpu_cannot,
        uses_memory_that_was_allocated_ahead_if_it_is_large_enough,
        makes_no_shadow_that_would_leave_the_job_little_room,
        makes_a_shadow_of_as_many_pieces_as_there_is_room_for,
        uses_more_memory_once_the_job_has_freed_some,
        makes_no_shadow_where_another_process_takes_the_memory_meanwhile,
        gives_two_ranks_on_one_gpu_whole_snapshots,
        writes_nothing_more_once_a_copy_of_a_shadow_fails,
        gives_a_shadow_back_at_once_when_it_is_not_wanted_any_more,
        kept_the_staging_memory_of_a_fetch_that_failed_before_it_was_used,
        used_cuda_after_the_interpreter_ended_to_free_a_shadow,
    )
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_a_state_in_video_memory(case: str, tmp_path: Path) -> None:
    node = CudaNode.make(tmp_path / "node")
    environ = {**os.environ, **node.environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/stubs/framework'}"}
    words = [sys.executable, "-m", "tests.contract.test_state_video", case, str(node.state)]
    ran = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.wide
@pytest.mark.thorough
def test_the_program_that_compares_copies_of_a_state_runs(tmp_path: Path) -> None:
    """It is run where a machine with a GPU is lent, which is no time to find out."""
    node = CudaNode.make(tmp_path / "node")
    environ = {**os.environ, **node.environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/stubs/framework'}"}
    words = [sys.executable, "-m", "tests.gpu.state_sweep", "40"]
    ran = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for way in ("pinned, out", "the agent's way", "ring of 16", "checked by", "pool pinned", "straight to pages"):
        assert way in ran.stdout


@pytest.mark.wide
@pytest.mark.thorough
def test_the_program_that_leaves_room_for_a_shadow_leaves_just_that(tmp_path: Path) -> None:
    """It is run on real GPUs only, too."""
    room_bytes = 64 * MIB
    node = CudaNode.make(tmp_path / "node", gpu_bytes=2 * CONTEXT_BYTES)
    environ = {**os.environ, **node.environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/stubs/framework'}"}
    words = [sys.executable, "-m", "tests.gpu.leave_room", "0", str(room_bytes)]
    ran = subprocess.run(words, env=environ, cwd=ROOT, input="fill\n", capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    free_bytes = node.gpu_bytes - CONTEXT_BYTES - int(ran.stdout.split()[1])
    left_bytes = free_bytes - int(node.gpu_bytes * shadow.SHARE_LEFT_FREE)
    assert room_bytes - leave_room.TOLERANCE_BYTES - 4 * MIB <= left_bytes <= room_bytes


if __name__ == "__main__":
    {**CASES, "a_rank": a_rank}[sys.argv[1]](Path(sys.argv[2]))

"""Facts that the code relies on about video memory that outlives processes and that other processes can reach.

Rows as in driver.py, in the same table. A row must not keep anything for the next one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import Any

from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.kernel_copy import KernelCopier
from tests.kit.driver import (
    MIB,
    NOISE_BYTES,
    ROWS,
    Rig,
    Target,
    begin,
    eventually,
    fails,
    goes_on,
    must,
    must_be,
    row,
    swapped,
    take_off,
)

__all__ = ["ROWS"]

BLOCK_BYTES = 1 << 16


class MappedPieces:
    """Pieces of video memory of one GPU, mapped one after the other into one range of addresses."""

    def __init__(self, contexts: list[Any], gpu: int, *sizes_bytes: int) -> None:
        self._sizes_bytes = sizes_bytes
        self.va = cuda.reserve(sum(sizes_bytes))
        self.fds: list[int] = []
        at = self.va
        for size_bytes in sizes_bytes:
            handle = cuda.create(gpu, size_bytes)
            self.fds.append(cuda.export(handle))
            cuda.map_at(at, handle, size_bytes)
            cuda.release_handle(handle)
            at += size_bytes
        cuda.access(self.va, sum(sizes_bytes), range(len(contexts)))

    def close(self) -> None:
        cuda.unmap(self.va, sum(self._sizes_bytes))
        cuda.free_va(self.va, sum(self._sizes_bytes))
        for fd in self.fds:
            os.close(fd)


@contextmanager
def contexts(count: int) -> Generator[list[Any]]:
    """The contexts of the first GPUs, each with access to the others' memory."""
    made = [cuda.retain(ordinal) for ordinal in range(count)]
    for one in made:
        for other in made:
            if one is not other:
                cuda.enable_peer(one, other)
                cuda.enable_peer(one, other)
    cuda.use(made[0])
    yield made
    cuda.use(None)
    for ordinal in range(count):
        cuda.release(ordinal)


def read(va: int, size_bytes: int, context: Any) -> bytes:
    buffer = ctypes.create_string_buffer(size_bytes)
    stream = cuda.create_stream()
    cuda.copy_async(ctypes.addressof(buffer), None, va, context, size_bytes, stream)
    cuda.synchronize(stream)
    must(cuda.is_done(stream), "a stream that was waited for has work left")
    cuda.destroy_stream(stream)
    return buffer.raw


def write(va: int, content: bytes, context: Any) -> None:
    buffer = ctypes.create_string_buffer(content, len(content))
    stream = cuda.create_stream()
    cuda.copy_async(va, context, ctypes.addressof(buffer), None, len(content), stream)
    cuda.synchronize(stream)
    cuda.destroy_stream(stream)


def carry(
    target: Target, sizes_bytes: list[int], at: int, flat: Any, own: Any, *, out: bool, by: KernelCopier | None = None
) -> None:
    """Copy the program's pieces to the flat range, or back, through the handles that it reports."""
    cuda.use(own)
    stream = cuda.create_stream()
    opened: list[int] = []
    handles = [bytes.fromhex(text) for text in target.ask("handles").split()[1:]]
    for handle, size_bytes in zip(handles, sizes_bytes, strict=True):
        opened.append(cuda.open_ipc(handle))
        if out:
            cuda.copy_async(at, flat, opened[-1], own, size_bytes, stream)
        elif by is not None:
            by.copy_async(opened[-1], at, size_bytes, stream)
        else:
            cuda.copy_async(opened[-1], own, at, flat, size_bytes, stream)
        at += size_bytes
    cuda.synchronize(stream)
    cuda.destroy_stream(stream)
    for address in opened:
        cuda.close_ipc(address)


@row()
def a_context_takes_memory_and_frees_it(rig: Rig) -> None:
    cuda.start()
    uuid = cuda.devices()[0].uuid
    idle_bytes = rig.look().used_bytes[uuid]
    with contexts(1):
        must((os.getpid(), uuid) in rig.look().by_process, "a process with a context is not listed")
        free_bytes, total_bytes = cuda.memory(0)
        must_be(total_bytes, cuda.devices()[0].total_bytes, "the memory of the GPU")
        must(0 < free_bytes < total_bytes, f"{free_bytes} of {total_bytes} bytes are free")
    eventually(lambda: rig.look().used_bytes[uuid] - idle_bytes < NOISE_BYTES, "a context that is gone takes room")


@row()
def held_memory_outlives_its_maker_and_its_last_descriptor_frees_it(rig: Rig) -> None:
    """A descriptor alone keeps it: NVML counts the memory without a process, and another process reads the bytes."""
    cuda.start()
    uuid, size_bytes = cuda.devices()[0].uuid, 256 * MIB
    idle = rig.look()
    maker, fd = rig.hold(0, size_bytes, 0x5A)
    maker.kill()
    eventually(
        lambda: abs(rig.look().used_bytes[uuid] - idle.used_bytes[uuid] - size_bytes) < NOISE_BYTES,
        "what the descriptor holds is not what NVML counts",
    )
    must_be(set(rig.look().by_process), set(idle.by_process), "who is on the GPUs")
    with contexts(1) as (context,):
        handle = cuda.import_(fd)
        va = cuda.reserve(size_bytes)
        cuda.map_at(va, handle, size_bytes)
        cuda.access(va, size_bytes, [0])
        for offset in (0, size_bytes - BLOCK_BYTES):
            must_be(set(read(va + offset, BLOCK_BYTES, context)), {0x5A}, f"the content at {offset}")
        cuda.unmap(va, size_bytes)
        cuda.free_va(va, size_bytes)
        cuda.release_handle(handle)
    must(rig.look().used_bytes[uuid] >= idle.used_bytes[uuid] + size_bytes, "a user's end freed what is held")
    os.close(fd)
    eventually(
        lambda: abs(rig.look().used_bytes[uuid] - idle.used_bytes[uuid]) < NOISE_BYTES,
        "the last descriptor freed nothing",
    )


@row()
def allocating_needs_no_context_and_refuses_missing_devices(rig: Rig) -> None:
    cuda.start()
    uuid, unit_bytes = cuda.devices()[0].uuid, cuda.granularity(0)
    must(unit_bytes >= 1 << 16 and unit_bytes & (unit_bytes - 1) == 0, f"the granularity is {unit_bytes}")
    before = rig.look()
    total_bytes = cuda.devices()[0].total_bytes // unit_bytes * unit_bytes
    with fails(cuda.INVALID_VALUE, cuda.OUT_OF_MEMORY):
        cuda.create(0, total_bytes + unit_bytes)
    most = cuda.create(0, total_bytes // 4 * 3 // unit_bytes * unit_bytes)
    with fails(cuda.OUT_OF_MEMORY):
        cuda.create(0, total_bytes // 2 // unit_bytes * unit_bytes)
    cuda.release_handle(most)
    must(abs(rig.look().used_bytes[uuid] - before.used_bytes[uuid]) < NOISE_BYTES, "a refusal took memory")
    handle = cuda.create(0, 64 * unit_bytes)
    fd = cuda.export(handle)
    cuda.release_handle(handle)
    must(rig.look().used_bytes[uuid] >= before.used_bytes[uuid] + 64 * unit_bytes - NOISE_BYTES, "nothing is held")
    os.close(fd)
    eventually(lambda: abs(rig.look().used_bytes[uuid] - before.used_bytes[uuid]) < NOISE_BYTES, "it is held for ever")


@row()
def held_memory_is_not_free_for_other_processes(rig: Rig) -> None:
    """A program that takes all free memory does not get the reservation for a restore."""
    target, _ = begin(rig, 1)
    size_bytes = 512 * MIB
    handle = cuda.create(0, size_bytes)
    fd = cuda.export(handle)
    cuda.release_handle(handle)
    target.ask("grab")
    must_be(target.ask("alloc 256"), f"refused {cuda.OUT_OF_MEMORY}", "an allocation on a GPU that is full")
    os.close(fd)
    eventually(lambda: target.ask("alloc 64") == "allocated", "the room was not given back")


@row()
def one_copy_crosses_adjacent_pieces(rig: Rig) -> None:
    del rig
    cuda.start()
    unit_bytes = cuda.granularity(0)
    with contexts(1) as (context,), closing(MappedPieces([context], 0, unit_bytes, unit_bytes, 2 * unit_bytes)) as flat:
        content = os.urandom(2 * BLOCK_BYTES)
        for border in (unit_bytes, 2 * unit_bytes):
            write(flat.va + border - BLOCK_BYTES, content, context)
            must_be(read(flat.va + border - BLOCK_BYTES, 2 * BLOCK_BYTES, context), content, "what crosses a border")


@row()
def another_process_copies_out_and_in_by_handles(rig: Rig) -> None:
    """And after the program has freed what was exported, its checkpoint goes well."""
    target, digest = begin(rig, 64, 3)
    sizes_bytes = [64 * MIB, 3 * MIB]
    with mmap.mmap(-1, sum(sizes_bytes)) as memory, contexts(1) as (context,):
        view = ctypes.c_char.from_buffer(memory)
        at = ctypes.addressof(view)
        cuda.register(at, len(memory))
        carry(target, sizes_bytes, at, None, context, out=True)
        target.ask("free")
        take_off(target.pid)
        cuda.restore(target.pid)
        cuda.unlock(target.pid)
        target.ask("make")
        must(target.ask("digest") != digest, "memory that is new has the old content")
        carry(target, sizes_bytes, at, None, context, out=False)
        cuda.unregister(at)
        del view
    goes_on(target, digest)


@row(gpus=2)
def a_job_moves_with_its_bytes_on_the_other_gpu(rig: Rig) -> None:
    """The whole of a move by peer, in small: 256 MiB held where they are to go, the rest by the driver."""
    move(rig, by_processors=False)


@row(gpus=2)
def a_kernel_copies_memory_that_counts_as_another_gpus(rig: Rig) -> None:
    """The same, with the last copy done by the program that the helper brings along."""
    move(rig, by_processors=True)


def move(rig: Rig, *, by_processors: bool) -> None:
    target, digest = begin(rig, 192, 64)
    sizes_bytes = [192 * MIB, 64 * MIB]
    second = cuda.devices()[1].uuid
    with contexts(2) as (old, new), closing(MappedPieces([old, new], 1, 128 * MIB, 128 * MIB)) as flat:
        carry(target, sizes_bytes, flat.va, new, old, out=True)
        target.ask("free")
        take_off(target.pid)
        cuda.restore(target.pid, swapped())
        cuda.unlock(target.pid)
        target.ask("make")
        by = KernelCopier(new) if by_processors else None
        carry(target, sizes_bytes, flat.va, new, new, out=False, by=by)
        if by is not None:
            by.close()
    goes_on(target, digest)
    must(rig.look().by_process.get((target.pid, second), 0) >= sum(sizes_bytes), "its memory is not on the other GPU")


@row()
def a_handle_of_freed_memory_is_refused(rig: Rig) -> None:
    target, _ = begin(rig, 16)
    handle = bytes.fromhex(target.ask("handles").split()[1])
    target.end()
    with contexts(1), fails():
        cuda.open_ipc(handle)


@row()
def a_checkpoint_destroys_a_process_that_has_anothers_memory_open(rig: Rig) -> None:
    """Why hegmd never checkpoints one: it goes well, no restore after it does, and there is no way back from there."""
    target, _ = begin(rig, 16)
    owner = rig.start(0, 16)
    target.ask("open " + owner.ask("handles").split()[1])
    take_off(target.pid)
    for _ in range(2):
        with fails():
            cuda.restore(target.pid)
        must_be(cuda.state(target.pid), "checkpointed", "the state after a restore that failed")
    with fails(cuda.ILLEGAL_STATE):
        cuda.unlock(target.pid)
    must_be(owner.ask("ping"), "pong", "the owner's answer")


@row()
def memory_that_another_has_open_does_not_hinder_its_owner(rig: Rig) -> None:
    """A helper that closes slowly, or one of another program, does not delay the owner."""
    target, digest = begin(rig, 16)
    handle = bytes.fromhex(target.ask("handles").split()[1])
    with contexts(1):
        address = cuda.open_ipc(handle)
        take_off(target.pid)
        cuda.restore(target.pid)
        cuda.unlock(target.pid)
        cuda.close_ipc(address)
    goes_on(target, digest)


@row()
def the_digest_differs_for_different_contents(rig: Rig) -> None:
    """This makes every other row able to fail: a digest that compared nothing would always pass."""
    target, digest = begin(rig, 2)
    with contexts(1) as (context,):
        cuda.use(context)
        address = cuda.open_ipc(bytes.fromhex(target.ask("handles").split()[1]))
        write(address + MIB, b"\xff" * 8, context)
        cuda.close_ipc(address)
    must(target.ask("digest") != digest, "eight bytes were changed and the digest stayed")
    target.ask("fill")
    must_be(target.ask("digest"), digest, "the digest of the same content")

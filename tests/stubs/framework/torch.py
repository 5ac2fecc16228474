"""A pretend PyTorch whose storages are pieces of the stub CUDA driver's video memory: what `shown` needs of it.

PyTorch for CUDA is not to be had in CI. This one's allocator cuts blocks from segments as PyTorch's does, for each
stream its own, and keeps what is free until `empty_cache`. Streams are numbers; which one a storage was made on is
noted in `made_on`. To be found as `torch`, put this folder on the path.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import math
from collections.abc import Iterator
from typing import Any

MIB = 1 << 20

driver = ctypes.CDLL("libcuda.so.1")
driver.cuMemFree_v2.argtypes = (ctypes.c_uint64,)
driver.cuMemcpyHtoD_v2.argtypes = (ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t)
driver.cuMemcpyDtoH_v2.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_size_t)


class OutOfMemoryError(RuntimeError):
    """As PyTorch calls it."""


class Storage:
    """Bytes on a GPU; `stream` is where its memory was made."""

    def __init__(self, content: bytes, stream: int = 0) -> None:
        self.device = Device("cuda", 0)
        self.address = 0
        self.size_bytes = 0
        with cuda.stream(stream):
            self.resize_(len(content))
        assert not driver.cuMemcpyHtoD_v2(self.address, content, len(content))

    def data_ptr(self) -> int:
        return self.address

    def resize_(self, size_bytes: int) -> None:
        if self.address:
            cuda.caching_allocator_delete(self.address)
        self.address, self.size_bytes = 0, size_bytes
        if size_bytes:
            self.address = cuda.caching_allocator_alloc(size_bytes, device=0, stream=cuda.current_stream)
            cuda.made_on.append(cuda.current_stream)

    def nbytes(self) -> int:
        return self.size_bytes

    def untyped_storage(self) -> Storage:
        """Keep the method: callers that mistake it for a tensor need it."""
        return self

    def overwrite(self, content: bytes) -> None:
        assert not driver.cuMemcpyHtoD_v2(self.address, content, len(content))

    def content(self) -> bytes:
        copy = ctypes.create_string_buffer(self.size_bytes)
        assert not driver.cuMemcpyDtoH_v2(copy, self.address, self.size_bytes)
        return copy.raw


class Device:
    def __init__(self, kind: str, index: int) -> None:
        self.type = kind
        self.index = index


class Stream:
    def __init__(self, number: int, device: int) -> None:
        self.number = number
        self.device = device


class Segment:
    """Memory of the driver's; its blocks by where they begin, each with its bytes and whether it is used."""

    def __init__(self, address: int, size_bytes: int, stream: int, *, is_small: bool) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.stream = stream
        self.is_small = is_small
        self.blocks = {address: [size_bytes, False]}

    def cut(self, address: int, size_bytes: int) -> int:
        free_bytes, _ = self.blocks[address]
        if free_bytes - size_bytes >= (512 if self.is_small else MIB + 1):
            self.blocks[address + size_bytes] = [free_bytes - size_bytes, False]
            free_bytes = size_bytes
        self.blocks[address] = [free_bytes, True]
        return address

    def free(self, address: int) -> None:
        self.blocks[address][1] = False
        joined: dict[int, list[Any]] = {}
        last = 0
        for at, (size_bytes, is_used) in sorted(self.blocks.items()):
            if joined and not is_used and not joined[last][1]:
                joined[last][0] += size_bytes
            else:
                last = at
                joined[at] = [size_bytes, is_used]
        self.blocks = joined


class Cuda:
    """`torch.cuda`: one device, and its allocator."""

    ExternalStream = Stream

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.made_on: list[int] = []
        self.current_stream = 0
        self.snapshots = 0
        self.summed = 0
        #: Functions that fail from now on, as after a failure of CUDA.
        self.fails: set[str] = set()

    def fail_if_told(self, what: str) -> None:
        if what in self.fails:
            raise RuntimeError(f"{what}: an illegal memory access was encountered")

    def init(self) -> None:
        start()

    def get_allocator_backend(self) -> str:
        return "native"

    def memory_snapshot(self) -> list[dict[str, Any]]:
        self.fail_if_told("memory_snapshot")
        self.snapshots += 1
        return [
            {
                "address": segment.address,
                "total_size": segment.size_bytes,
                "device": 0,
                "stream": segment.stream,
                "segment_type": "small" if segment.is_small else "large",
                "blocks": [
                    {"address": address, "size": size_bytes, "state": "active_allocated" if is_used else "inactive"}
                    for address, (size_bytes, is_used) in sorted(segment.blocks.items())
                ],
            }
            for segment in reversed(self.segments)
        ]

    def memory_reserved(self, device: int) -> int:
        assert device == 0
        return builtins.sum(segment.size_bytes for segment in self.segments)

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, dict[str, dict[str, int]]]:
        small_bytes = builtins.sum(segment.size_bytes for segment in self.segments if segment.is_small)
        reserved = {"all": self.memory_reserved(device), "small_pool": small_bytes}
        return {"reserved_bytes": {name: {"current": size_bytes} for name, size_bytes in reserved.items()}}

    def mem_get_info(self, device: int) -> tuple[int, int]:
        assert device == 0
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert not driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def caching_allocator_alloc(self, size_bytes: int, device: int, stream: int) -> int:
        """The smallest free block of that stream that it fits in, or else a new segment."""
        assert device == 0
        size_bytes = -(-size_bytes // 512) * 512
        is_small = size_bytes <= MIB
        free = [
            (block[0], address, segment)
            for segment in self.segments
            if (segment.stream, segment.is_small) == (stream, is_small)
            for address, block in segment.blocks.items()
            if not block[1] and block[0] >= size_bytes
        ]
        if free:
            _, address, segment = min(free, key=lambda found: found[:2])
            return segment.cut(address, size_bytes)
        whole_bytes = (
            2 * MIB if is_small else 20 * MIB if size_bytes < 10 * MIB else -(-size_bytes // MIB // 2) * 2 * MIB
        )
        made = ctypes.c_uint64()
        if driver.cuMemAlloc_v2(ctypes.byref(made), ctypes.c_size_t(whole_bytes)):
            self.empty_cache()
            if driver.cuMemAlloc_v2(ctypes.byref(made), ctypes.c_size_t(whole_bytes)):
                raise OutOfMemoryError(f"tried to allocate {size_bytes} bytes")
        self.segments.append(Segment(made.value, whole_bytes, stream, is_small=is_small))
        return self.segments[-1].cut(made.value, size_bytes)

    def caching_allocator_delete(self, address: int) -> None:
        next(segment for segment in self.segments if address in segment.blocks).free(address)

    def empty_cache(self) -> None:
        self.fail_if_told("empty_cache")
        for segment in list(self.segments):
            if not any(is_used for _, is_used in segment.blocks.values()):
                assert not driver.cuMemFree_v2(segment.address)
                self.segments.remove(segment)

    def synchronize(self, device: int) -> None:
        assert device == 0
        assert not driver.cuCtxSynchronize()

    def set_device(self, device: int) -> None:
        assert device == 0

    @contextlib.contextmanager
    def device(self, device: int) -> Iterator[None]:
        assert device == 0
        yield

    @contextlib.contextmanager
    def stream(self, stream: Stream | int | None) -> Iterator[None]:
        before = self.current_stream
        self.current_stream = stream.number if isinstance(stream, Stream) else stream or 0
        yield
        self.current_stream = before


class Tensor:
    """Elements of a storage, one after the other. Its copy in the process's own memory is a `HostTensor`."""

    def __init__(self, count: int, width: int) -> None:
        self.storage = Storage(bytes(count * width)) if count else None
        self.first, self.count, self.width = 0, count, width

    def set_(self, storage: Storage, first: int, size: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        assert strides[-1] == 1
        self.storage, self.first, self.count = storage, first, math.prod(size)
        return self

    def __getitem__(self, part: slice) -> Tensor:
        found = Tensor(0, self.width)
        first, end, _ = part.indices(self.count)
        assert self.storage is not None
        return found.set_(self.storage, self.first + first, (end - first,), (1,))

    def untyped_storage(self) -> Storage:
        assert self.storage is not None
        return self.storage

    def data_ptr(self) -> int:
        return self.untyped_storage().data_ptr() + self.first * self.width

    def content(self) -> bytes:
        assert self.storage is not None
        content = self.storage.content()
        return content[self.first * self.width : (self.first + self.count) * self.width]

    def fill(self, content: bytes) -> None:
        assert self.storage is not None
        assert len(content) == self.count * self.width
        assert not driver.cuMemcpyHtoD_v2(self.storage.address + self.first * self.width, content, len(content))

    def copy_(self, other: Tensor) -> None:
        self.fill(other.content())

    def cpu(self) -> HostTensor:
        return HostTensor(self.content() if self.count else b"")


class HostTensor:
    """Bytes in the process's own memory."""

    def __init__(self, content: bytes) -> None:
        self._content = ctypes.create_string_buffer(content, len(content))

    def data_ptr(self) -> int:
        return ctypes.addressof(self._content)

    def numel(self) -> int:
        return len(self._content)

    def element_size(self) -> int:
        return 1


uint8, int64 = 1, 8
inference_mode = contextlib.nullcontext


def empty(count: int, dtype: int, device: str) -> Tensor:
    assert device == "cuda:0"
    return Tensor(count, dtype)


def as_tensor(memory: Any, device: str) -> Tensor:
    """Return a tensor in memory that the caller owns."""
    assert device == "cuda:0"
    described = memory.__cuda_array_interface__
    assert described["typestr"] == "<i8"
    count = math.prod(described["shape"])
    found, storage = Tensor(0, int64), Storage(b"")
    storage.address, storage.size_bytes = described["data"][0], count * int64
    return found.set_(storage, 0, described["shape"], (1,))


def sum(words: Tensor, dim: int, out: Tensor) -> None:  # noqa: A001 - PyTorch's name
    """Sum each row's words; a row has 4096 bytes here."""
    cuda.fail_if_told("sum")
    assert dim == 1
    page_words = words.count // out.count if out.count else 0
    numbers = memoryview(words.content()).cast("Q").tolist()
    rows = (numbers[start : start + page_words] for start in range(0, len(numbers), page_words or 1))
    out.fill(b"".join((builtins.sum(row) & (1 << 64) - 1).to_bytes(8, "little") for row in rows))
    cuda.summed += 1


class autograd:  # noqa: N801 - the name of a module
    """Return the graphs that have kept a tensor; there are none here."""

    class graph:  # noqa: N801 - the same
        """Without a version to count."""


class _C:
    """The part in C++, which has no workspaces to clear."""


cuda = Cuda()


def start() -> None:
    """A context on GPU 0, as the first tensor there makes one."""
    context = ctypes.c_void_p()
    assert not driver.cuInit(0)
    assert not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    assert not driver.cuCtxSetCurrent(context)

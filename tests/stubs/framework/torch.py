"""A pretend PyTorch whose storages are pieces of the stub CUDA driver's video memory: what `shown` needs of it.

PyTorch for CUDA is not to be had in CI. This one has an allocator as simple as can be: every storage is an allocation
of its own, and what is free goes back with `empty_cache`. Streams are numbers; which one a storage was made on is noted
in `made_on`. To be found as `torch`, put this folder on the path.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

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
            cuda.cached.append(self.address)
            cuda.segments.pop(self.address)
        self.address, self.size_bytes = 0, size_bytes
        if size_bytes:
            address = ctypes.c_uint64()
            if driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes)):
                raise OutOfMemoryError(f"tried to allocate {size_bytes} bytes")
            self.address = address.value
            cuda.segments[self.address] = (size_bytes, cuda.current_stream)
            cuda.made_on.append(cuda.current_stream)

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


class Cuda:
    """`torch.cuda`: one device, and the books of its allocator."""

    ExternalStream = Stream

    def __init__(self) -> None:
        self.segments: dict[int, tuple[int, int]] = {}
        self.cached: list[int] = []
        self.made_on: list[int] = []
        self.current_stream = 0
        self.snapshots = 0

    def get_allocator_backend(self) -> str:
        return "native"

    def memory_snapshot(self) -> list[dict[str, Any]]:
        self.snapshots += 1
        return [
            {"address": address, "total_size": size_bytes, "device": 0, "stream": stream}
            for address, (size_bytes, stream) in reversed(self.segments.items())
        ]

    def empty_cache(self) -> None:
        for address in self.cached:
            assert not driver.cuMemFree_v2(address)
        self.cached.clear()

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


class autograd:  # noqa: N801 - the name of a module
    """Which graphs have kept a tensor; there are none here."""

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

"""A process that holds video memory and can tell whether it is what it was: `vram_owner.py GPU COUNT SIZE_BYTES`.

Calls the driver's functions alone, with any Python: on a real GPU or the stub. Answers each line with one: `handles`,
`free`, `make` (empty), `check` (the number of pieces that are as they were filled), `leave`. Pieces are of whole
blocks; each block is a random one of its own, so that a block in another's place is found.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Iterator

BLOCK_BYTES = 1 << 20
STEP_BYTES = 512


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


cuda = ctypes.CDLL("libcuda.so.1")
libc = ctypes.CDLL(None)
Address = ctypes.c_uint64
cuda.cuMemAlloc_v2.argtypes = (ctypes.POINTER(Address), ctypes.c_size_t)
cuda.cuMemFree_v2.argtypes = (Address,)
cuda.cuMemcpyHtoD_v2.argtypes = (Address, ctypes.c_void_p, ctypes.c_size_t)
cuda.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, Address, ctypes.c_size_t)
cuda.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
cuda.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(Handle), Address)
libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def call(name: str, *arguments: object) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name}: {code}")


class Owner:
    def __init__(self, gpu: int, count: int, size_bytes: int) -> None:
        self.count, self.size_bytes = count, size_bytes
        # Wide enough that every block begins somewhere else in it.
        self._blocks = count * (size_bytes // BLOCK_BYTES)
        self._width_bytes = BLOCK_BYTES + self._blocks * STEP_BYTES
        self._random = ctypes.create_string_buffer(random.Random(0).randbytes(self._width_bytes), self._width_bytes)
        call("cuInit", 0)
        context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
        call("cuCtxSetCurrent", context)
        self.pieces: list[int] = []
        self.make()
        for piece in range(count):
            for address, expected in self._layout(piece):
                call("cuMemcpyHtoD_v2", address, expected, BLOCK_BYTES)

    def _layout(self, piece: int) -> Iterator[tuple[int, int]]:
        in_a_piece = self.size_bytes // BLOCK_BYTES
        start = ctypes.addressof(self._random)
        for index in range(in_a_piece):
            number = piece * in_a_piece + index
            yield self.pieces[piece] + index * BLOCK_BYTES, start + number * STEP_BYTES

    def handles(self) -> str:
        listed: list[str] = []
        for piece in self.pieces:
            handle = Handle()
            call("cuIpcGetMemHandle", ctypes.byref(handle), piece)
            listed.append(bytes(memoryview(handle)).hex())
        return " ".join(listed)

    def free(self) -> str:
        while self.pieces:
            call("cuMemFree_v2", self.pieces.pop())
        return "freed"

    def make(self) -> str:
        for _ in range(self.count):
            address = Address()
            call("cuMemAlloc_v2", ctypes.byref(address), self.size_bytes)
            self.pieces.append(address.value)
        return "made"

    def check(self) -> str:
        buffer = ctypes.create_string_buffer(BLOCK_BYTES)
        good = 0
        for piece in range(self.count):
            same = True
            for address, expected in self._layout(piece):
                call("cuMemcpyDtoH_v2", buffer, address, BLOCK_BYTES)
                same = same and libc.memcmp(buffer, expected, BLOCK_BYTES) == 0
            good += same
        return str(good)


def main() -> None:
    owner = Owner(*map(int, sys.argv[1:4]))
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "leave":
            return
        sys.stdout.write(getattr(owner, line.strip())() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

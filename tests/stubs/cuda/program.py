"""A CUDA program for tests, by the driver's own functions alone: `program.py GPU MIB...`, with a line per command.

On several GPUs (`0,1`) its pieces lie on them in turn, and the counter on the first.

Holds one piece of video memory of each size given, filled with a pattern of its own (large ones in every eighth MiB and
the last, with zeros between, which take no disk on the stub), and a counter beside them. Runs on the stub and on a real
GPU, with any Python and nothing installed. It answers every line on its standard input with one on its standard output,
so whoever drives it always knows where it is, and ends with its input:

    (at start)      ready PID
    ping            pong: without a call of CUDA
    step            step N: adds one to the counter, which is in video memory
    run [SECONDS]   from now on it steps without being asked, once in so long, until the next line
    digest          digest HEX: of all its contents, the counter left out
    handles         handles HEX...: an IPC handle for each piece
    free, make      freed, made: gives its pieces back, and makes them again, empty
    stay NUMBER...  staying: those pieces lie in memory that it never gives back; freed, they are empty too
    copy WAY FILE N START SIZE PLACE
                    copied: a part of piece N, `out` into the file at that place, or `in` from there
    fill            filled: with the pattern, as at the start
    queue SECONDS   queued: work that keeps its stream busy for so long; the answer does not wait for it
    drain           drained: once nothing is queued any more
    alloc MIB       allocated, or refused CODE: one more piece
    grab            grabbed BYTES: takes all memory there is, in ever smaller pieces
    hoard           hoarding: takes all memory there is, again and again without being asked, until the next line
    uuid            uuid GPU-...: what it takes its GPU for
    info            info FREE TOTAL
    open HEX, shut  opened, shut: another process's memory
    reach, part     reached CODE..., parted CODE...: each of its GPUs may reach every other one's memory, or no longer
    across          crossed: the first piece went to each other GPU and was the same there

A call that fails ends it with the call's name and code.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import sys
import zlib

MIB = 1 << 20
COUNTER_BYTES = 8
LARGE_MIB = 64
EMPTY = bytes(MIB)


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


cuda = ctypes.CDLL("libcuda.so.1")
libc = ctypes.CDLL(None)
libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
Address = ctypes.c_uint64
cuda.cuMemAlloc_v2.argtypes = (ctypes.POINTER(Address), ctypes.c_size_t)
cuda.cuMemFree_v2.argtypes = (Address,)
cuda.cuMemcpyHtoD_v2.argtypes = (Address, ctypes.c_char_p, ctypes.c_size_t)
cuda.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, Address, ctypes.c_size_t)
cuda.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
cuda.cuCtxEnablePeerAccess.argtypes = (ctypes.c_void_p, ctypes.c_uint)
cuda.cuCtxDisablePeerAccess.argtypes = (ctypes.c_void_p,)
cuda.cuMemcpyPeer.argtypes = (Address, ctypes.c_void_p, Address, ctypes.c_void_p, ctypes.c_size_t)
cuda.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(Handle), Address)
cuda.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(Address), Handle, ctypes.c_uint)
cuda.cuIpcCloseMemHandle.argtypes = (Address,)
cuda.cuLaunchHostFunc.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def call(name: str, *arguments: object) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name}: {code}")


class Program:
    def __init__(self, ordinals: list[int], sizes_mib: list[int]) -> None:
        self.sizes_mib = sizes_mib
        self.pieces: list[int] = []
        self.staying: dict[int, int] = {}
        self.opened: list[int] = []
        self.steps = 0
        call("cuInit", 0)
        self.contexts = [ctypes.c_void_p() for _ in ordinals]
        for context, ordinal in zip(self.contexts, ordinals):  # noqa: B905 - runs on Python 3.9 too
            call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        call("cuCtxSetCurrent", self.contexts[0])
        self.ordinals, self.ordinal = ordinals, ordinals[0]
        self.counter = self.allocate(COUNTER_BYTES)
        call("cuMemcpyHtoD_v2", self.counter, bytes(COUNTER_BYTES), COUNTER_BYTES)
        self.make()
        self.fill()

    def allocate(self, size_bytes: int) -> int:
        address = Address()
        call("cuMemAlloc_v2", ctypes.byref(address), size_bytes)
        return address.value

    def step(self) -> str:
        raw = ctypes.create_string_buffer(COUNTER_BYTES)
        call("cuMemcpyDtoH_v2", raw, self.counter, COUNTER_BYTES)
        counted = int.from_bytes(raw.raw, "little")
        if counted != self.steps:
            sys.exit(f"the counter says {counted} after {self.steps} steps")
        self.steps += 1
        call("cuMemcpyHtoD_v2", self.counter, self.steps.to_bytes(COUNTER_BYTES, "little"), COUNTER_BYTES)
        return f"step {self.steps}"

    def ping(self) -> str:
        return "pong"

    def digest(self) -> str:
        content = 0
        buffer = ctypes.create_string_buffer(MIB)
        for piece, size_mib in zip(self.pieces, self.sizes_mib):  # noqa: B905 - runs on Python 3.9 too
            for index in range(size_mib):
                call("cuMemcpyDtoH_v2", buffer, piece + index * MIB, MIB)
                is_empty = libc.memcmp(buffer, EMPTY, MIB) == 0
                content = zlib.crc32(b"0" if is_empty else buffer, content)  # six times as fast as blake2b
        return f"digest {content:08x}"

    def fill(self) -> str:
        for number, piece in enumerate(self.pieces):
            size_mib = self.sizes_mib[number]
            pattern = random.Random(number).randbytes(MIB + min(size_mib, MIB))
            for index in range(size_mib):
                is_random = size_mib <= LARGE_MIB or index % 8 == 0 or index == size_mib - 1
                part = pattern[index % MIB : index % MIB + MIB] if is_random else EMPTY
                call("cuMemcpyHtoD_v2", piece + index * MIB, part, MIB)
        return "filled"

    def handles(self) -> str:
        listed: list[str] = []
        for piece in self.pieces:
            handle = Handle()
            call("cuIpcGetMemHandle", ctypes.byref(handle), piece)
            listed.append(bytes(memoryview(handle)).hex())
        return " ".join(["handles", *listed])

    def free(self) -> str:
        for number, piece in enumerate(self.pieces):
            if number in self.staying:
                for index in range(self.sizes_mib[number]):
                    call("cuMemcpyHtoD_v2", piece + index * MIB, EMPTY, MIB)
            else:
                call("cuMemFree_v2", piece)
        self.pieces = []
        return "freed"

    def stay(self, *numbers: str) -> str:
        self.staying = {int(number): self.pieces[int(number)] for number in numbers}
        return "staying"

    def copy(self, way: str, file: str, *numbers: str) -> str:
        piece, start, size_bytes, place = map(int, numbers)
        fd = os.open(file, os.O_RDWR)
        buffer = ctypes.create_string_buffer(size_bytes)
        if way == "out":
            call("cuMemcpyDtoH_v2", buffer, self.pieces[piece] + start, size_bytes)
            os.pwrite(fd, buffer.raw, place)
        else:
            buffer.raw = os.pread(fd, size_bytes, place)
            call("cuMemcpyHtoD_v2", self.pieces[piece] + start, buffer.raw, size_bytes)
        os.close(fd)
        return "copied"

    def make(self) -> str:
        self.pieces = []
        for number, size_mib in enumerate(self.sizes_mib):
            call("cuCtxSetCurrent", self.contexts[number % len(self.contexts)])
            self.pieces.append(self.staying.get(number) or self.allocate(size_mib * MIB))
        call("cuCtxSetCurrent", self.contexts[0])
        return "made"

    def between(self, name: str, *arguments: object) -> list[int]:
        """Return the answers of a call about another context, for each pair, in the first one's."""
        answers: list[int] = []
        for context in self.contexts:
            call("cuCtxSetCurrent", context)
            answers += [getattr(cuda, name)(other, *arguments) for other in self.contexts if other is not context]
        call("cuCtxSetCurrent", self.contexts[0])
        return answers

    def reach(self) -> str:
        return " ".join(["reached", *map(str, self.between("cuCtxEnablePeerAccess", 0))])

    def part(self) -> str:
        return " ".join(["parted", *map(str, self.between("cuCtxDisablePeerAccess"))])

    def across(self) -> str:
        received, sent = ctypes.create_string_buffer(MIB), ctypes.create_string_buffer(MIB)
        call("cuMemcpyDtoH_v2", sent, self.pieces[0], MIB)
        for context in self.contexts[1:]:
            call("cuCtxSetCurrent", context)
            there = self.allocate(MIB)
            call("cuMemcpyPeer", there, context, self.pieces[0], self.contexts[0], MIB)
            call("cuMemcpyDtoH_v2", received, there, MIB)
            call("cuMemFree_v2", there)
            if received.raw != sent.raw:
                sys.exit("what went from GPU to GPU came as something else")
        call("cuCtxSetCurrent", self.contexts[0])
        return "crossed"

    def queue(self, seconds: str) -> str:
        """A host function holds up the stream for that long, on any GPU: libc's usleep, called by the driver."""
        sleep = ctypes.cast(libc.usleep, ctypes.c_void_p)
        call("cuLaunchHostFunc", None, sleep, ctypes.c_void_p(int(float(seconds) * 1e6)))
        return "queued"

    def drain(self) -> str:
        call("cuCtxSynchronize")
        return "drained"

    def alloc(self, size_mib: str) -> str:
        code = cuda.cuMemAlloc_v2(ctypes.byref(Address()), int(size_mib) * MIB)
        return f"refused {code}" if code else "allocated"

    def grab(self) -> str:
        grabbed, size_bytes = 0, 1 << 40
        while size_bytes >= MIB:
            if cuda.cuMemAlloc_v2(ctypes.byref(Address()), size_bytes):
                size_bytes //= 2
            else:
                grabbed += size_bytes
        return f"grabbed {grabbed}"

    def uuid(self) -> str:
        raw = ctypes.create_string_buffer(16)
        call("cuDeviceGetUuid_v2", raw, self.ordinal)
        digits = raw.raw.hex()
        return f"uuid GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def info(self) -> str:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return f"info {free.value} {total.value}"

    def open(self, text: str) -> str:
        handle, address = Handle(), Address()
        ctypes.memmove(ctypes.byref(handle), bytes.fromhex(text), 64)
        call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, 1)
        self.opened.append(address.value)
        return "opened"

    def shut(self) -> str:
        call("cuIpcCloseMemHandle", self.opened.pop())
        return "shut"


COMMANDS = {"step", "digest", "fill", "handles", "free", "make", "queue", "drain", "alloc", "grab", "uuid", "info"}
COMMANDS |= {"open", "ping", "shut", "reach", "part", "across", "stay", "copy"}
# The action that it repeats until the next command, and its reply to that command.
BY_ITSELF = {"run": "step", "hoard": "grab"}
SAID = {"run": "running", "hoard": "hoarding"}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    program = Program([int(gpu) for gpu in sys.argv[1].split(",")], [int(size) for size in sys.argv[2:]])
    say(f"ready {os.getpid()}")
    by_itself, pause_s = "", 0.0
    while True:
        while by_itself and not select.select([0], [], [], pause_s)[0]:
            getattr(program, BY_ITSELF[by_itself])()
        line = os.read(0, 4096)  # one line at a time: the other side waits for each answer
        if not line:
            return
        command, *arguments = line.decode().split()
        by_itself = command if command in BY_ITSELF else ""
        if by_itself:
            pause_s = float(*arguments)
            say(SAID[by_itself])
        elif command in COMMANDS:
            say(getattr(program, command)(*arguments))
        else:
            sys.exit(f"what is {command!r}?")


if __name__ == "__main__":
    main()

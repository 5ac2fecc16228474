"""How copies are best cut and spread: `copy_sweep.py SIZE_BYTES`. Prints rates; judges nothing."""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.address_space import VideoSpace
from hegmd.gpu_helper.allocations import Allocations, CopyResult, joined
from hegmd.gpu_helper.copy_session import Contexts
from hegmd.gpu_helper.copying import Copy, CopySizes
from hegmd.gpu_helper.host_memory import HostMemory
from hegmd.gpu_helper.preallocation import SessionResources
from hegmd.gpu_helper.staging import HostSpace, StagedCopy
from hegmd.gpu_helper.staging import StagingSizes as Staging

MIB = 1 << 20
GIB = 1 << 30
OWNER = Path(__file__).with_name("vram_owner.py")
PIECES = 64
PACES = [
    CopySizes(chunk_bytes=chunk_mib * MIB, batch_bytes=4 * GIB, streams_a_group=streams)
    for chunk_mib in (16, 64, 256, 1024)
    for streams in (1, 2, 4)
]

STAGED = [
    Staging(strands, slots, slot_mib * MIB, strands)
    for strands in (16, 24, 32)
    for slots in (2, 3)
    for slot_mib in (4, 8)
]


def show(name: str, done: CopyResult) -> None:
    """Print one line."""
    rate = done.copied_bytes / done.copy_s / 1e9
    print(f"    {name:50} {rate:7.1f} GB/s  open {done.open_s * 1e3:6.1f} ms  close {done.close_s * 1e3:6.1f} ms")


def video(contexts: Contexts, ordinals: list[int], size_bytes: int) -> VideoSpace:
    held = contexts.hold(ordinals)
    handle = cuda.create(ordinals[-1], size_bytes)
    fd = cuda.export(handle)
    cuda.release_handle(handle)
    made = VideoSpace(ordinals[-1], held, [(fd, size_bytes)], start=0, peer=True)
    os.close(fd)
    return made


def main() -> None:
    size_bytes = int(sys.argv[1])
    cuda.start()
    ordinals = [device.ordinal for device in cuda.devices()][:2]
    contexts = Contexts()
    held = contexts.hold(ordinals)
    for ordinal in ordinals:
        for other in ordinals:
            if ordinal != other:
                cuda.enable_peer(held[ordinal], held[other])
    provisions = SessionResources(held)
    provisions.provide(max(*(pace.streams for pace in PACES), *(staging.streams for staging in STAGED)))
    argv = [sys.executable, str(OWNER), "0", str(PIECES), str(size_bytes // PIECES)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdout.readline()
        owner.stdin.write("handles\n")
        owner.stdin.flush()
        handles = [bytes.fromhex(text) for text in owner.stdout.readline().split()]
        places = [[index, 0, size_bytes // PIECES, index * (size_bytes // PIECES)] for index in range(PIECES)]
        space = video(contexts, ordinals, size_bytes)
        for pace in PACES:
            for direction in ("out", "in"):
                streams = provisions.streams(ordinals[-1] if direction == "in" else ordinals[0])
                done = Copy(held[0], space, direction, handles, streams, pace=pace).run(places, lambda _: None)
                cut = f"{pace.chunk_bytes // MIB} MiB, {pace.streams_a_group} streams a group"
                show(f"video {direction:3} {cut}", done)
        space.close()
        fd = os.memfd_create("pool")
        os.ftruncate(fd, size_bytes)
        for staging in STAGED:
            host = HostSpace(held[0], HostMemory(fd, size_bytes), staging)
            for direction in ("out", "in"):
                gpu_end = Allocations(held[0], handles)
                copy = StagedCopy(held[0], host, direction, gpu_end, provisions.streams(ordinals[0])[: staging.streams])
                done = copy.run(joined(places, PIECES), lambda _: None)
                cut = f"{staging.slots_a_strand} slots of {staging.slot_bytes // MIB} MiB"
                show(f"host {direction:3} {staging.strands} strands, {cut}", done)
            host.close()
        os.close(fd)
        owner.kill()


if __name__ == "__main__":
    main()

"""PyTorch's native caching allocator on one GPU, as far as it decides which memory is reserved (torch 2.4 to 2.11).

Blocks up to 1 MiB are cut from segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, and larger ones have
segments in multiples of 2 MiB. The smallest free block that fits is used and split. Has what the agent asks of
`torch.cuda`; the driver never lacks memory.
"""

from __future__ import annotations

from typing import Any

MIB = 1 << 20


class Block:
    """A part of a segment."""

    def __init__(self, segment: Segment, address: int, size_bytes: int) -> None:
        self.segment, self.address, self.size_bytes = segment, address, size_bytes
        self.is_used = False


class Segment:
    """Memory from the driver. Its blocks are in the order of their addresses."""

    def __init__(self, address: int, size_bytes: int, stream: int, *, is_small: bool) -> None:
        self.address, self.size_bytes, self.stream, self.is_small = address, size_bytes, stream, is_small
        self.blocks = [Block(self, address, size_bytes)]


class CachingAllocator:
    """A stub of `torch.cuda`."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._used: dict[int, Block] = {}
        self._next_address = 1 << 40

    def caching_allocator_alloc(self, size_bytes: int, device: int = 0, stream: int = 0) -> int:
        del device
        size_bytes = -(-size_bytes // 512) * 512
        is_small = size_bytes <= MIB
        fitting = [
            block
            for segment in self._segments
            if segment.is_small == is_small and segment.stream == stream
            for block in segment.blocks
            if not block.is_used and block.size_bytes >= size_bytes
        ]
        if fitting:
            block = min(fitting, key=lambda one: (one.size_bytes, one.address))
        else:
            unit_bytes = 20 * MIB if not is_small and size_bytes < 10 * MIB else 2 * MIB
            made = Segment(self._next_address, -(-size_bytes // unit_bytes) * unit_bytes, stream, is_small=is_small)
            self._next_address += made.size_bytes + 64 * MIB
            self._segments.append(made)
            block = made.blocks[0]
        rest_bytes = block.size_bytes - size_bytes
        if rest_bytes >= (512 if is_small else MIB + 1):
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, Block(block.segment, block.address + size_bytes, rest_bytes))
            block.size_bytes = size_bytes
        block.is_used = True
        self._used[block.address] = block
        return block.address

    def caching_allocator_delete(self, address: int) -> None:
        block = self._used.pop(address)
        block.is_used = False
        merged: list[Block] = []
        for one in block.segment.blocks:
            if merged and not one.is_used and not merged[-1].is_used:
                merged[-1].size_bytes += one.size_bytes
            else:
                merged.append(one)
        block.segment.blocks = merged

    def empty_cache(self) -> None:
        self._segments = [segment for segment in self._segments if any(block.is_used for block in segment.blocks)]

    def memory_stats_as_nested_dict(self, _device: int) -> dict[str, Any]:
        pools = {"all": (False, True), "large_pool": (False,), "small_pool": (True,)}
        return {"reserved_bytes": {name: {"current": self.reserved_bytes(*of)} for name, of in pools.items()}}

    def reserved_bytes(self, *is_small: bool) -> int:
        """The memory of all segments, or of small or large ones only."""
        wanted = is_small or (False, True)
        return sum(segment.size_bytes for segment in self._segments if segment.is_small in wanted)

    def mem_get_info(self, _device: int) -> tuple[int, int]:
        return 1 << 40, 1 << 41

    def get_allocator_backend(self) -> str:
        return "native"

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "address": segment.address,
                "total_size": segment.size_bytes,
                "stream": segment.stream,
                "device": 0,
                "segment_type": "small" if segment.is_small else "large",
            }
            for segment in self._segments
        ]

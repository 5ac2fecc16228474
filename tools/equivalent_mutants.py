"""Mutants that make no difference to anybody, each with the reason: for `make mutants`.

A mutant is here by its file, the line before and the line after; a text with a space in it is "..." there, so that an
entry outlives a change of words. It is not judged and not counted as a survivor.
"""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "hegmd/protocol/images.py",
        'gid: int = field("...", default=0)',
        'gid: int = field("...", default=1)',
    ): "Every manifest that is written has a gid.",
    (
        "hegmd/memory/spill_file.py",
        "if end + _SUM.size > BLOCK_BYTES or _SUM.unpack_from(block, end)[0] != zlib.crc32(block[:end]):",
        "if end + _SUM.size >= BLOCK_BYTES or _SUM.unpack_from(block, end)[0] != zlib.crc32(block[:end]):",
    ): "A name would have to fill a block of 4,096 bytes exactly; the longest has about 100.",
    (
        "hegmd/images/files/user_processes.py",
        'self._session.lose("...", quietly=True)',
        'self._session.lose("...", quietly=False)',
    ): "The level of a line in the log.",
    (
        "hegmd/migration/methods/gpu_reservation.py",
        "held[gpu] = max(held.get(gpu, 0), driver_bytes + subject.storage_reservation_bytes)",
        "held[gpu] = max(held.get(gpu, 1), driver_bytes + subject.storage_reservation_bytes)",
    ): "Nothing is reserved in single bytes.",
    (
        "hegmd/protocol/codec.py",
        "strict_map_key=True,",
        "strict_map_key=False,",
    ): "Each key is checked afterwards, and refused with the same error.",
    ("hegmd/server/listener.py", "BACKLOG = 1024", "BACKLOG = 1025"): "The length of a queue.",
    (
        "hegmd/memory/pool_places.py",
        'if len(words) > 2 and words[2] == b"hugetlbfs":',
        'if len(words) > 3 and words[2] == b"hugetlbfs":',
    ): "Each line of /proc/mounts has six words.",
    (
        "hegmd/memory/pool.py",
        "return self.held_bytes + self.ready.size_bytes + int((available or 0) * SHARE_OF_AVAILABLE)",
        "return self.held_bytes + self.ready.size_bytes + int((available or 1) * SHARE_OF_AVAILABLE)",
    ): "Half a byte is none.",
    (
        "hegmd/migration/machine/actions.py",
        "return op  # an alarm that was set for an earlier phase",
        "return None  # an alarm that was set for an earlier phase",
    ): "The machine takes None for an operation that has not changed.",
    (
        "hegmd/migration/model.py",
        'pool_ready_bytes: int = field("...", default=0)',
        'pool_ready_bytes: int = field("...", default=1)',
    ): "Every plan that is made has these bytes.",
    (
        "hegmd/migration/plan/targets.py",
        'draft.against(BAD_REQUEST, f"...", hint, pid=pid)',
        'draft.against(BAD_REQUEST, f"...", hint, pid=pid)',
    ): "How much of a wrong argument a message quotes.",
    (
        "hegmd/migration/carriers/copying.py",
        'raise AssertionError("...")',
        "pass",
    ): "The last attempt returns or raises, so this line is never reached.",
    (
        "hegmd/agent/state/storage/tensors.py",
        "tensor = torch.empty(0, dtype=dtype, device=CPU)",
        "tensor = torch.empty(1, dtype=dtype, device=CPU)",
    ): "The tensor gets another storage in the next line.",
    (
        "hegmd/agent/state/storage/checksums.py",
        "_FAR_BYTES = 8 * 1024 * 1024",
        "_FAR_BYTES = 8 * 1024 * 1025",
    ): "The size of the blocks that are summed; it is in whole pages, and the sum of all is the same.",
}

"""Reading a library's symbols without loading it."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest

from hegmd.system.elf import NotElf, build_id, defined_functions
from tests.unit.node.doctor.node import shared_library


def test_defined_symbols_are_distinguished_from_needed_ones(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(shared_library(defines=("cuInit", "cuExtra"), needs=("malloc",)))
    assert defined_functions(library, ("cuInit", "malloc", "cuMissing")) == {"cuInit"}


def test_names_that_only_begin_alike_are_not_taken(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(shared_library(defines=("cuInitialise",)))
    assert defined_functions(library, ("cuInit",)) == frozenset()


def test_a_real_library_is_read_as_the_loader_reads_it() -> None:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libc.so" in line}
    assert mapped, "this process runs on the C library"
    names = ("malloc", "printf", "pthread_create", "no_such_function", "cuCheckpointProcessLock")
    loaded = ctypes.CDLL(None)
    expected = {name for name in names if hasattr(loaded, name)}
    assert expected == {"malloc", "printf", "pthread_create"}
    assert defined_functions(Path(mapped.pop()), names) == expected


def test_every_kind_of_broken_library_is_reported(tmp_path: Path) -> None:
    whole = shared_library(defines=("cuInit",))
    library = tmp_path / "library.so"
    for size in (0, 10, 64, 80, len(whole) - 1):
        library.write_bytes(whole[:size])
        with pytest.raises(NotElf):
            defined_functions(library, ("cuInit",))
    library.write_bytes(b"\x7fELF\x01\x01" + whole[6:])
    with pytest.raises(NotElf, match="64-bit"):
        defined_functions(library, ("cuInit",))


def test_a_table_that_claims_more_than_the_file_is_not_believed(tmp_path: Path) -> None:
    whole = bytearray(shared_library(defines=("cuInit",)))
    section = int.from_bytes(whole[40:48], "little") + 64
    whole[section + 32 : section + 40] = (2**62).to_bytes(8, "little")
    library = tmp_path / "library.so"
    library.write_bytes(whole)
    with pytest.raises(NotElf, match="ends before its tables"):
        defined_functions(library, ("cuInit",))


@pytest.mark.thorough
def test_any_byte_may_be_wrong(tmp_path: Path) -> None:
    whole = shared_library(defines=("cuInit",), needs=("malloc",))
    library = tmp_path / "library.so"
    for position in range(len(whole)):
        broken = bytearray(whole)
        broken[position] ^= 0xFF
        library.write_bytes(broken)
        try:
            assert defined_functions(library, ("cuInit",)) <= {"cuInit"}
        except NotElf:
            continue


def with_notes(*notes: tuple[bytes, int, bytes]) -> bytes:
    """A program with nothing but program headers and these notes: name, kind, value."""
    body = b""
    for name, kind, value in notes:
        body += struct.pack("<III", len(name), len(value), kind)
        body += name.ljust(-(-len(name) // 4) * 4, b"\0") + value.ljust(-(-len(value) // 4) * 4, b"\0")
    header = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 1)
    return bytes(header) + struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(body), len(body), 4) + body


def test_a_build_id_is_found_behind_other_notes(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(with_notes((b"GNU\0", 1, b"\0" * 16), (b"stapsdt\0", 3, b"x"), (b"GNU\0", 3, b"\xab\xcd\xef")))
    assert build_id(program) == "abcdef"
    program.write_bytes(with_notes((b"GNU\0", 1, b"\0" * 16)))
    assert build_id(program) is None


def test_notes_that_end_too_soon_are_no_build_id(tmp_path: Path) -> None:
    whole = with_notes((b"GNU\0", 3, b"\xab" * 20))
    program = tmp_path / "program"
    for size in range(len(whole)):
        program.write_bytes(whole[:size])
        with pytest.raises(NotElf):
            build_id(program)
    program.write_text("#!/bin/sh\n")
    with pytest.raises(NotElf):
        build_id(program)

"""Facts about programs and shared libraries without loading them: the functions they export, and their build id.

The daemon must not load CUDA. The section headers, which strippers keep, lead to the dynamic symbol table; the program
headers lead to the build id. Only the needed parts are read, and no table may exceed its file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

_DYNSYM = 11
_NOTES = 4
_BUILD_ID = 3
_NOTES_MAX_BYTES = 1 << 16
_UNDEFINED = 0


class NotElf(ValueError):
    """The file is not an ELF file that can be read here."""


class _Section(NamedTuple):
    kind: int
    offset: int
    size_bytes: int
    link: int
    entry_bytes: int


def defined_functions(path: Path, wanted: Iterable[str]) -> frozenset[str]:
    """Return those of the wanted names that the library exports. Raises NotElf and OSError."""
    names = {name.encode(): name for name in wanted}
    with open(path, "rb") as file:
        sections = _sections(file)
        table = next((section for section in sections if section.kind == _DYNSYM), None)
        if table is None or table.link >= len(sections) or table.entry_bytes != 24:
            raise NotElf("there is no dynamic symbol table")
        symbols = _bytes_at(file, table.offset, table.size_bytes)
        strings = _bytes_at(file, sections[table.link].offset, sections[table.link].size_bytes)
    found: set[str] = set()
    usable = len(symbols) - len(symbols) % 24
    for name_at, _info, _other, section, _value, _size in struct.iter_unpack("<IBBHQQ", symbols[:usable]):
        if section != _UNDEFINED:
            name = names.get(strings[name_at : strings.find(b"\0", name_at)])
            if name is not None:
                found.add(name)
    return frozenset(found)


def build_id(path: Path) -> str | None:
    """Return the build id in hexadecimal, or None. Raises NotElf and OSError."""
    with open(path, "rb") as file:
        header = _header(file)
        (offset,) = struct.unpack_from("<Q", header, 32)
        entry_bytes, count = struct.unpack_from("<HH", header, 54)
        if count and entry_bytes != 56:
            raise NotElf("its program headers have an unknown form")
        table = _bytes_at(file, offset, count * entry_bytes)
        for kind, _flags, at, _address, _physical, size_bytes, _memory, _align in struct.iter_unpack(
            "<IIQQQQQQ", table
        ):
            if kind == _NOTES and (found := _build_id_in(_bytes_at(file, at, min(size_bytes, _NOTES_MAX_BYTES)))):
                return found
    return None


def _build_id_in(notes: bytes) -> str | None:
    while len(notes) >= 12:
        name_bytes, value_bytes, kind = struct.unpack_from("<III", notes)
        value_at = 12 + (name_bytes + 3 & ~3)
        if kind == _BUILD_ID and notes[12 : 12 + name_bytes] == b"GNU\0":
            return notes[value_at : value_at + value_bytes].hex()
        notes = notes[value_at + (value_bytes + 3 & ~3) :]
    return None


def _header(file: BinaryIO) -> bytes:
    header = file.read(64)
    # 64 bit, little endian: all machines with these drivers.
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        raise NotElf("it is not a 64-bit little-endian ELF file")
    return header


def _sections(file: BinaryIO) -> list[_Section]:
    header = _header(file)
    (offset,) = struct.unpack_from("<Q", header, 40)
    entry_bytes, count = struct.unpack_from("<HH", header, 58)
    if entry_bytes != 64:
        raise NotElf("its section headers have an unknown form")
    table = _bytes_at(file, offset, count * entry_bytes)
    return [
        _Section(kind, at, size_bytes, link, entry)
        for _name, kind, _flags, _address, at, size_bytes, link, _info, _align, entry in struct.iter_unpack(
            "<IIQQQQIIQQ", table
        )
    ]


def _bytes_at(file: BinaryIO, offset: int, size_bytes: int) -> bytes:
    if offset + size_bytes > os.fstat(file.fileno()).st_size:
        raise NotElf("it ends before its tables do")
    file.seek(offset)
    return file.read(size_bytes)

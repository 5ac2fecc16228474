"""The description of a simulated node: `2x8GiB`, or a TOML file with any GPUs and faults.

Owns the format and its checks; `node_spec` has the resulting values, and `simulated` runs the node. A description is
checked completely, so that all mistakes are reported at once, with their lines. contrib/simulation/ has examples of
every key.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from hegmd.errors import BAD_CONFIG, HegmError
from hegmd.node.devices.node_spec import (
    GPU_FAULTS,
    LINK_KINDS,
    MAX_GPUS,
    PLAYED,
    UNITS_BYTES,
    USE_KINDS,
    VENDOR,
    VENDOR_FAULTS,
    FaultSpec,
    GpuSpec,
    LinkSpec,
    ProcessSpec,
    Topology,
    default_gpu,
    full_mesh,
    gpu_id,
    parse_size,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_BYTES = 1 << 20
FORMAT = "start from an example in contrib/simulation/"

_SHORT = re.compile(r"(\d{1,9})\s*[xX]\s*(\S.*)")
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")


def parse_topology(spec: str) -> Topology:
    """Return the node of `--simulate SPEC`. Raises HegmError BAD_CONFIG that lists every mistake."""
    short = _SHORT.fullmatch(spec.strip())
    if short is not None:
        return _from_short(spec, int(short[1]), short[2])
    return _from_file(Path(spec))


def _from_short(spec: str, count: int, size: str) -> Topology:
    memory_bytes = parse_size(size)
    if memory_bytes is None or memory_bytes < 1:
        raise HegmError(
            BAD_CONFIG,
            f"cannot simulate {spec!r}: {size!r} is not an amount of memory",
            f"write a number with a unit, such as 2x8GiB; units are {', '.join(UNITS_BYTES)}",
        )
    if not 1 <= count <= MAX_GPUS:
        raise HegmError(BAD_CONFIG, f"cannot simulate {count} GPUs", f"ask for 1 to {MAX_GPUS} of them, such as 2x8GiB")
    return Topology(gpus=tuple(default_gpu(index, memory_bytes) for index in range(count)), links=full_mesh(count))


def _from_file(path: Path) -> Topology:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte in it
        raise HegmError(
            BAD_CONFIG,
            f"cannot simulate {str(path)!r}: {getattr(error, 'strerror', None) or error}",
            "give a number of GPUs and their memory, such as 2x8GiB, or the path of a TOML file",
        ) from None
    if len(content) > FILE_BYTES:
        raise HegmError(BAD_CONFIG, f"{path} is larger than {FILE_BYTES} bytes", FORMAT)
    try:
        text = content.decode()
        values = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # Both errors name the position in their message.
        raise HegmError(BAD_CONFIG, f"{path} is not TOML: {error}", FORMAT) from None
    return _Description(path, text).read(values)


class _Problem(NamedTuple):
    line: int | None
    message: str
    hint: str


def _shown(value: Any) -> str:
    """Return the value as in the file, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip())


def _is_size(value: Any) -> bool:
    return isinstance(value, str) and (parse_size(value) or 0) > 0


def _is_pci_address(value: Any) -> bool:
    return isinstance(value, str) and _PCI.fullmatch(value) is not None


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and {type(each) for each in cast("list[object]", value)} <= {dict}


@dataclass(slots=True, eq=False, repr=False)
class _Table:
    """A table of the file: returns its checked keys, and records unknown ones."""

    where: str
    values: dict[str, Any]
    lines: dict[str, int]
    line: int | None
    problems: list[_Problem]
    requested: list[str] = field(default_factory=list[str])

    def wrong(self, key: str, why: str, hint: str) -> None:
        place = f"{self.where}.{key}" if self.where else key
        self.problems.append(_Problem(self.lines.get(key, self.line), f"{place}: {why}", hint))

    def take(self, key: str, form: str, fits: Callable[[Any], bool]) -> Any:
        """Return the value, or None if it is missing or not valid, which is recorded."""
        self.requested.append(key)
        value = self.values.get(key)
        if value is None or fits(value):
            return value
        self.wrong(key, f"{_shown(value)} does not fit", f"write {form}")
        return None

    def text(self, key: str) -> str | None:
        return cast("str | None", self.take(key, "a text that is not empty", _is_text))

    def flag(self, key: str) -> bool | None:
        return cast("bool | None", self.take(key, "true or false", lambda value: isinstance(value, bool)))

    def number(self, key: str, low: int, high: int = 2**53) -> int | None:
        form = f"a whole number from {low} to {high}"
        return cast("int | None", self.take(key, form, lambda value: type(value) is int and low <= value <= high))

    def word(self, key: str, words: Sequence[str]) -> str | None:
        return cast("str | None", self.take(key, f"one of {', '.join(words)}", lambda value: value in words))

    def size(self, key: str) -> int | None:
        value = self.take(key, 'an amount of memory with its unit, such as "8GiB"', _is_size)
        return None if value is None else parse_size(value)

    def must_have(self, key: str, hint: str) -> None:
        if key not in self.values:
            self.wrong(key, "is missing", hint)

    def finish(self) -> None:
        """Record every key that was not used."""
        for key in self.values:
            if key not in self.requested:
                near = difflib.get_close_matches(key, self.requested, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known here are {', '.join(sorted(self.requested))}"
                self.wrong(key, "is not known", hint)


class _Description:
    """A file that is parsed into a Topology."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()
        self._problems: list[_Problem] = []

    def read(self, values: dict[str, Any]) -> Topology:
        top = self._table("", values, 0)
        gpus = self._gpus(top)
        links = self._links(top, len(gpus))
        faults = self._faults(top, len(gpus))
        versions: dict[str, Any] = {
            key: top.text(key) for key in ("driver_version", "library_version", "compute_version")
        }
        top.finish()
        if self._problems:
            raise self._error()
        known = {key: text for key, text in versions.items() if text is not None}
        return replace(Topology(gpus=gpus, links=links, faults=faults), **known)

    def _error(self) -> HegmError:
        problems = sorted(self._problems, key=lambda problem: problem.line or 0)
        lines = [
            f"{self._path}{f':{problem.line}' if problem.line else ''}: {problem.message}; {problem.hint}"
            for problem in problems
        ]
        facts = [{"line": each.line, "message": each.message, "hint": each.hint} for each in problems]
        return HegmError(BAD_CONFIG, "\n".join(lines), FORMAT, {"problems": facts})

    def _table(self, where: str, values: dict[str, Any], header_line: int) -> _Table:
        """A table whose header is on that line, 0 for the top of the file; its keys follow until the next header."""
        lines: dict[str, int] = {}
        for number, line in enumerate(self._lines[header_line:], header_line + 1):
            if re.match(r"\s*\[", line):
                break
            if match := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*=", line):
                lines.setdefault(match[1], number)
        return _Table(where, values, lines, header_line or None, self._problems)

    def _tables(self, parent: _Table, key: str, *, within: str = "") -> list[_Table]:
        """The tables of `[[key]]`, each with its own lines."""
        name = f"{within}.{key}" if within else key
        form = f"[[{name}]] on a line of its own, and its keys below it"
        found = parent.take(key, form, _are_tables)
        entries = cast("list[dict[str, Any]]", found or [])
        header = re.compile(rf"\s*\[\[\s*{re.escape(name)}\s*\]\]")
        headers = [
            number for number, line in enumerate(self._lines, 1) if header.match(line) and number > (parent.line or 0)
        ]
        if len(headers) < len(entries):  # written inline, as an array of tables
            headers = [parent.lines.get(key, 0)] * len(entries)
        prefix = f"{parent.where}." if parent.where else ""
        return [
            self._table(f"{prefix}{key}[{index}]", entry, line)
            for index, (entry, line) in enumerate(zip(entries, headers, strict=False))
        ]

    def _gpus(self, top: _Table) -> tuple[GpuSpec, ...]:
        gpus: list[GpuSpec] = []
        tables = self._tables(top, "gpu")
        if not top.values.get("gpu"):
            top.wrong("gpu", "there is no GPU", "describe at least one under [[gpu]]")
        for table in tables:
            count = table.number("count", 1, MAX_GPUS) or 1
            made = self._gpu(table, len(gpus), alone=count == 1)
            gpus += [made] + [self._twin(made, len(gpus) + offset) for offset in range(1, count)]
        if len(gpus) > MAX_GPUS:
            top.wrong("gpu", f"{len(gpus)} GPUs are too many", f"describe at most {MAX_GPUS}")
        for attribute in ("uuid", "pci_address"):
            values = [getattr(gpu, attribute) for gpu in gpus]
            for value in sorted({value for value in values if values.count(value) > 1}):
                top.wrong("gpu", f"{values.count(value)} GPUs have the {attribute} {value}", "give each its own")
        return tuple(gpus)

    @staticmethod
    def _twin(gpu: GpuSpec, index: int) -> GpuSpec:
        """Return the next GPU of a `count`: the same except for its identity and its processes."""
        own = default_gpu(index, gpu.memory_bytes)
        return replace(gpu, uuid=own.uuid, pci_address=own.pci_address, processes=())

    def _gpu(self, table: _Table, index: int, *, alone: bool) -> GpuSpec:
        memory_bytes = table.size("memory")
        table.must_have("memory", 'write it with its unit, such as "8GiB"')
        facts: dict[str, Any] = {"processes": self._processes(table, memory_bytes)}
        for key in ("name", "chip", "uuid"):
            facts[key] = table.text(key)
        facts["plays"] = table.word("vendor", PLAYED)
        if facts["plays"] is not None and facts["chip"] is None:
            facts["chip"] = f"simulated {facts['plays']}"  # GPUs of different vendors are different chips
        facts["pci_address"] = table.take("pci_address", 'an address such as "0000:41:00.0"', _is_pci_address)
        for key in ("uuid", "pci_address"):
            if key in table.values and not alone:
                table.wrong(key, "several GPUs cannot share it", "leave out count, or describe each GPU by itself")
        for key in ("mig", "mps", "persistence"):
            facts[key] = table.flag(key)
        for key, low, high in (
            ("numa_node", 0, 1023),
            ("utilisation_percent", 0, 100),
            ("temperature_celsius", -50, 150),
            ("power_watts", 0, 5000),
            ("power_limit_watts", 1, 5000),
            ("ecc_corrected", 0, 2**53),
            ("ecc_uncorrected", 0, 2**53),
            ("retired_pages", 0, 2**53),
            ("last_xid", 1, 65535),
        ):
            facts[key] = table.number(key, low, high)
        table.finish()
        return replace(
            default_gpu(index, memory_bytes or 0), **{key: value for key, value in facts.items() if value is not None}
        )

    def _processes(self, table: _Table, memory_bytes: int | None) -> tuple[ProcessSpec, ...]:
        processes: list[ProcessSpec] = []
        for each in self._tables(table, "process", within="gpu"):
            pid = each.number("pid", 1, 2**22)
            each.must_have("pid", "write the number that the driver would report")
            vram_bytes = each.size("memory")
            kind = each.word("kind", USE_KINDS) or "compute"
            each.finish()
            processes.append(ProcessSpec(pid or 0, vram_bytes, kind))
        used_bytes = sum(process.vram_bytes or 0 for process in processes)
        if memory_bytes is not None and used_bytes > memory_bytes:
            table.wrong(
                "process", f"they hold {used_bytes} bytes of {memory_bytes}", "give them less memory than the GPU has"
            )
        return tuple(processes)

    def _links(self, top: _Table, count: int) -> tuple[LinkSpec, ...]:
        mesh = top.word("links", ("all", "none"))
        tables = self._tables(top, "link")
        if tables and mesh is not None:
            top.wrong("links", "there are [[link]] tables as well", "keep one of the two")
        links: list[LinkSpec] = []
        ids = [gpu_id(index) for index in range(count)]
        pairs = [[one, other] for one in ids for other in ids if one != other]
        for table in tables:
            form = f'two different GPUs, such as ["gpu0", "gpu1"]; there are {", ".join(ids)}'
            ends = table.take("between", form, lambda value: value in pairs)
            table.must_have("between", form)
            kind = table.word("kind", LINK_KINDS) or "simulated"
            lanes = table.number("lanes", 1, 1024)
            bytes_per_s = table.number("bytes_per_s", 1)
            table.finish()
            if ends is not None:
                links.append(LinkSpec((ids.index(ends[0]), ids.index(ends[1])), kind, lanes, bytes_per_s))
        return tuple(links) if tables or mesh == "none" else full_mesh(count)

    def _faults(self, top: _Table, count: int) -> tuple[FaultSpec, ...]:
        faults: list[FaultSpec] = []
        targets = [*(gpu_id(index) for index in range(count)), VENDOR]
        for table in self._tables(top, "fault"):
            target = table.word("target", targets)
            fault = table.word("fault", VENDOR_FAULTS if target == VENDOR else GPU_FAULTS)
            after = table.number("after_snapshots", 0)
            lasts = table.number("for_snapshots", 1)
            table.must_have("target", f"write the id of a GPU, or {VENDOR}")
            table.must_have("fault", f"write one of {', '.join(GPU_FAULTS)}")
            if fault == "hang" and lasts is not None:
                table.wrong("for_snapshots", "while it hangs there are no snapshots to count", "leave it out")
            table.finish()
            faults.append(FaultSpec(target or "", fault or "", after or 0, lasts))
        return tuple(faults)

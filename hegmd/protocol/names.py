"""Resolves the names of GPUs and jobs. Pure; the client and the daemon use the same rules.

A GPU is named by its id (`gpu1`), its number (`1`, `cuda:1`), its UUID or a prefix of it, or its PCI address. A job is
named by its id (`j7`), its name, or the pid of one of its processes. Any other text is refused with the name that was
probably meant.
"""

from __future__ import annotations

import re

from ..errors import BAD_REQUEST, NOT_FOUND, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .snapshots import Gpu

# The shortest prefix of a UUID that counts as one, as in nvidia-smi.
_LEAST_UUID = 8
_NUMBER = re.compile(r"(?:cuda:|hip:|gpu)?(\d{1,6})", re.IGNORECASE)
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_JOB_ID = re.compile(r"j(\d{1,15})")
# A name has to be easy to type in a shell and to read in a table.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]*")
MAX_NAME_CHARS = 64


def gpu_named(text: str, gpus: Sequence[Gpu]) -> str:
    """Return the id of the GPU with that name. Raises NOT_FOUND, or BAD_REQUEST for a prefix of several UUIDs."""
    ids = [gpu.id for gpu in gpus]
    if text in ids:
        return text
    number = _NUMBER.fullmatch(text)
    if number is not None:
        found = [gpu.id for gpu in gpus if gpu.id == f"gpu{int(number[1])}"]
    elif (address := _pci_address(text)) is not None:
        found = [gpu.id for gpu in gpus if gpu.pci_address is not None and _pci_address(gpu.pci_address) == address]
    else:
        lowered = text.lower()
        found = [gpu.id for gpu in gpus if gpu.uuid.lower() == lowered]
        if not found and len(text) >= _LEAST_UUID:
            found = [gpu.id for gpu in gpus if gpu.uuid.lower().startswith(lowered)]
    if len(found) > 1:
        message = f"{text[:60]!r} is the beginning of the UUIDs of {', '.join(found)}"
        raise HegmError(BAD_REQUEST, message, "write more of it, or the id; run: hegmctl gpus", {"gpu": text[:60]})
    if not found:
        have = f"this node has {', '.join(ids)}" if ids else "this node has no GPU that hegmd can see"
        close = gpu_meant(text, ids)
        hint = f"did you mean {close}? run: hegmctl gpus" if close else "run: hegmctl gpus"
        raise HegmError(NOT_FOUND, f"no GPU {text[:60]!r}; {have}", hint, {"gpu": text[:60]})
    return found[0]


def _pci_address(text: str) -> tuple[int, int, int, int] | None:
    """Return domain (nvidia-smi writes eight digits of it), bus, device and function; None for other text."""
    parts = _PCI.fullmatch(text)
    if parts is None:
        return None
    return int(parts[1] or "0", 16), int(parts[2], 16), int(parts[3], 16), int(parts[4])


def gpu_meant(text: str, ids: Sequence[str]) -> str | None:
    """Return the GPU that was probably meant by an unknown name; None for a number that no GPU has."""
    return None if _NUMBER.fullmatch(text) else closest(text, ids)


def place_named(text: str, gpus: Sequence[Gpu]) -> str:
    """Return a target in the planner's form (`gpu1`, `gpu2,gpu3`, `gpu0=gpu2` or `cpu`) from what the user wrote.

    An unknown name stays, and the planner refuses it. Raises BAD_REQUEST for a prefix of several UUIDs.
    """
    return ",".join("=".join(_known(name, gpus) for name in pair.strip().split("=")) for pair in text.split(","))


def _known(name: str, gpus: Sequence[Gpu]) -> str:
    try:
        return gpu_named(name, gpus)
    except HegmError as error:
        if error.code is NOT_FOUND:
            return name
        raise


def job_number(text: str) -> int | None:
    """Return the number in a job's id; None if it is no id."""
    found = _JOB_ID.fullmatch(text)
    return None if found is None else int(found[1])


def why_no_name(name: str) -> str | None:
    """Return why a job cannot have this name; None if it can."""
    if len(name) > MAX_NAME_CHARS:
        return f"it has {len(name)} characters, and a name has at most {MAX_NAME_CHARS}"
    if not _NAME.fullmatch(name):
        return "a name begins with a letter, a digit or _, and has only these and . @ : + - in it"
    if name.isdigit() or job_number(name) is not None:
        return "it looks like a pid or the id of a job"
    return None


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that was probably meant, or None."""
    lowered, known = word.lower(), list(candidates)
    scored = [(distance(lowered, candidate), candidate) for candidate in known]
    allowed = max(1, len(word) // 3)
    near = sorted(pair for pair in scored if pair[0] <= allowed)
    if near:
        return near[0][1]
    started = [candidate for candidate in known if len(lowered) > 1 and candidate.startswith(lowered)]
    return started[0] if len(started) == 1 else None


def distance(first: str, second: str) -> int:
    """Return the number of edits between two words: a letter more, less or other, or two letters swapped."""
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        after = [i]
        for j, other in enumerate(second, 1):
            cost = min(row[j] + 1, after[j - 1] + 1, row[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            after.append(cost)
        before, row = row, after
    return row[-1]

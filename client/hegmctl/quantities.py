"""Numbers with units for people. Programs get bytes and seconds."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1024 ** (power + 1) for power, letter in enumerate("kmgtp")},
    **{f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate("kmgtp")},
}


def binary_size(size_bytes: int) -> str:
    """`8589934592` as `8.0 GiB`."""
    amount = float(size_bytes)
    for unit in _BINARY[:-1]:
        if abs(amount) < 1023.95 or (unit == "B" and abs(amount) < 1024):  # 1023.95 would be written as 1024.0
            return f"{size_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} {_BINARY[-1]}"


def used_of_total(used_bytes: int | None, total_bytes: int | None) -> str:
    """Return both in GiB, such as `1.0/8.0 GiB`; an unknown part is `-`."""
    if used_bytes is None and total_bytes is None:
        return "-"
    used = "-" if used_bytes is None else f"{used_bytes / 1024**3:.1f}"
    total = "-" if total_bytes is None else f"{total_bytes / 1024**3:.1f}"
    return f"{used}/{total} GiB"


def parse_size(text: str) -> int:
    """`2GiB`, `1.5 GB` or a number of bytes. Raises ValueError."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(digits) :].strip().lower()
    plain = digits.replace(".", "", 1)
    if unit not in _FACTORS or not (plain.isascii() and plain.isdigit()):
        raise ValueError(text)
    if "." not in digits:
        return int(digits) * _FACTORS[unit]  # without a float, which would round large numbers of bytes
    return round(float(digits) * _FACTORS[unit])


def duration(seconds: float) -> str:
    """`75.2` as `1 min 15 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit} {rest} {smaller_unit}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def without_times(text: str) -> str:
    """Return the message without its durations, which change each second and are no news."""
    import re

    return re.sub(r"[0-9.]+ s\b", "", text)

"""The targets of moves: each listed once, with the measurement and whether it is met.

Owns the aims: how long a job may stand, how far an estimate may be off, and what share of a link copies use. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tests.gpu.moves_parts import is_within_order
from tests.gpu.moves_timing import BUDGETS_S, LINK_BYTES_PER_S, Measured, groups

# An estimate may be off by this share of what happened.
ESTIMATE_OFF = 0.30
# Copies use at least this share of their link; below this size the time is for other things.
LINK_SHARE = 0.95
MIN_GIB = 8
#: As often a figure is taken at least, for its median to be one.
MIN_TIMES = 5


def verdicts(measured: Sequence[Measured]) -> list[str]:
    """A sentence for each aim that was measured, those that are not kept in bold."""
    return [
        f"{'kept' if is_kept else '**not kept**'}: {_name(key)}: {text}"
        for key, several in groups(measured).items()
        for is_kept, text in _of(key, several)
    ]


def _of(key: tuple[int, str, str, str], several: Sequence[Measured]) -> Iterator[tuple[bool, str]]:
    size_gib, action, carrier, _ = key
    took_s = statistics.median([one.took_s for one in several])
    times = f"{len(several)} times" + ("" if len(several) >= MIN_TIMES else f", fewer than {MIN_TIMES}")
    budget_s = BUDGETS_S.get((size_gib, action, carrier))
    if budget_s is not None:
        largest = "" if took_s <= budget_s else f", of which {_largest(several)}"
        yield took_s <= budget_s, f"stands for {took_s:.3f} s, {budget_s:g} allowed ({times}){largest}"
    estimates = [one.estimate_s for one in several if one.estimate_s is not None]
    if estimates:
        off = statistics.median(estimates) / took_s - 1
        yield abs(off) <= ESTIMATE_OFF, f"estimated within {ESTIMATE_OFF:.0%}: off by {off:+.0%} ({times})"
    limit = LINK_BYTES_PER_S.get(carrier)
    for direction in ("out", "in") if limit and size_gib >= MIN_GIB and carrier != "worker" else ():
        rates = [one.rates[direction] for one in several if direction in one.rates]
        if rates and (direction == "out" or carrier != "peer"):  # what comes in by peer crosses no link
            share = statistics.median(rates) / (limit or 1.0)
            yield (
                share >= LINK_SHARE,
                f"copies {direction} at {share:.1%} of the link, {LINK_SHARE:.0%} wanted ({times})",
            )


def _largest(several: Sequence[Measured]) -> str:
    """Return the largest part in words. The driver's part can seldom be changed, so the next ones too."""
    names = {name for one in several for name in one.parts if not is_within_order(name)}
    medians = {name: statistics.median([one.parts.get(name, 0.0) for one in several]) for name in names}
    found = sorted(names, key=lambda name: -medians[name])[:4]
    return ", ".join(f"{name} {medians[name]:.3f} s" for name in found) or "nothing is known"


def _name(key: tuple[int, str, str, str]) -> str:
    size_gib, action, carrier, where = key
    return f"{action} of {size_gib} GiB by {carrier}, {where}"

"""A strict reader of the Prometheus text format 0.0.4: it rejects more than Prometheus does.

Checks beyond the grammar: the samples of a family follow its HELP and TYPE, no series appears twice, counters have
the right names, and the buckets of a histogram are consistent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Labels = frozenset[tuple[str, str]]

_HELP = re.compile(r"# HELP ([a-z][a-z0-9_]*) ((?:[^\\\n]|\\\\|\\n)+)")
_TYPE = re.compile(r"# TYPE ([a-z][a-z0-9_]*) (gauge|counter|histogram)")
_SAMPLE = re.compile(r"([a-z][a-z0-9_]*)(?:\{(.+)\})? (-?[0-9.e+-]+|NaN|\+Inf|-Inf)")
_LABEL = re.compile(r'([a-z][a-z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(,|$)')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass
class ParsedFamily:
    kind: str
    meaning: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)


def parse(text: str) -> dict[str, ParsedFamily]:
    """The families in a text, by name. Raises AssertionError for anything that is not as it should be."""
    assert text.endswith("\n")
    families: dict[str, ParsedFamily] = {}
    lines = iter(text.split("\n")[:-1])
    current = ""
    for line in lines:
        if line.startswith("#"):
            helped = _HELP.fullmatch(line)
            assert helped, line
            typed = _TYPE.fullmatch(next(lines))
            assert typed, line
            assert typed[1] == helped[1]
            assert helped[1] not in families, f"{helped[1]} comes twice"
            current = helped[1]
            families[current] = ParsedFamily(typed[2], helped[2])
            continue
        name, labels, value = _sample(line)
        family = families[current]
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        assert name in {current + suffix for suffix in suffixes}, f"{name} stands under {current}"
        assert (name, labels) not in family.samples, f"{line} comes twice"
        family.samples[name, labels] = value
    for name, family in families.items():
        _check(name, family)
    return families


def _sample(line: str) -> tuple[str, Labels, float]:
    found = _SAMPLE.fullmatch(line)
    assert found, line
    labels: dict[str, str] = {}
    rest = found[2] or ""
    while rest:
        label = _LABEL.match(rest)
        assert label, line
        assert label[1] not in labels, line
        labels[label[1]] = re.sub(r"\\.", lambda escape: _ESCAPES[escape[0]], label[2])
        rest = rest[label.end() :]
        assert bool(rest) == (label[3] == ","), line
    return found[1], frozenset(labels.items()), float(found[3])


def _check(name: str, family: ParsedFamily) -> None:
    assert family.samples, f"{name} has no samples"
    assert (family.kind == "counter") == name.endswith("_total"), f"{name} is a {family.kind}"
    assert not name.endswith(("_count", "_sum", "_bucket"))
    if family.kind == "counter":
        assert all(value >= 0 for value in family.samples.values())
    if family.kind == "histogram":
        for series in {_without_bound(labels) for _, labels in family.samples}:
            _check_histogram(name, family, series)


def _without_bound(labels: Labels) -> Labels:
    return frozenset(pair for pair in labels if pair[0] != "le")


def _check_histogram(name: str, family: ParsedFamily, series: Labels) -> None:
    bins = [
        (float(dict(labels)["le"]), count)
        for (sample, labels), count in family.samples.items()
        if sample == f"{name}_bucket" and _without_bound(labels) == series
    ]
    assert bins == sorted(bins), "the bounds or the counts go down"
    assert [count for _, count in bins] == sorted(count for _, count in bins)
    assert bins[-1][0] == float("inf")
    assert bins[-1][1] == family.samples[f"{name}_count", series]
    assert family.samples[f"{name}_sum", series] >= 0

"""The text format, read back by a strict parser, with all kinds of names and numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd.telemetry.metrics import Histogram
from hegmd.telemetry.metrics.exposition import Exposition
from tests.cells import in_one_test
from tests.unit.telemetry.metrics.exposition_parser import parse


@pytest.mark.thorough
@given(st.text(min_size=1), st.dictionaries(st.sampled_from(["gpu", "name"]), st.text()), st.floats() | st.integers())
def test_any_text_and_number_is_parsed_unchanged(meaning: str, labels: dict[str, str], value: float) -> None:
    out = Exposition()
    out.family("hegmd_x", "gauge", meaning).add(value, labels)
    [family] = parse(out.text()).values()
    [((name, found), read)] = family.samples.items()
    assert name == "hegmd_x"
    assert dict(found) == labels
    assert read == float(value) or (math.isnan(read) and math.isnan(value))


def test_half_of_a_surrogate_pair_does_not_keep_the_text_from_being_encoded() -> None:
    out = Exposition()
    out.family("hegmd_x", "gauge", "X.").add(1, {"name": "a\udcffb"})
    assert b'name="a?b"' in out.text().encode()


def test_the_unknown_is_left_out_and_a_family_without_samples_with_it() -> None:
    out = Exposition()
    out.family("hegmd_x", "gauge", "X.").add(None)
    family = out.family("hegmd_y", "gauge", "Y.")
    family.add(None, {"gpu": "gpu0"})
    family.add(0, {"gpu": "gpu1"})
    assert out.text() == '# HELP hegmd_y Y.\n# TYPE hegmd_y gauge\nhegmd_y{gpu="gpu1"} 0\n'


def test_true_and_false_are_numbers() -> None:
    out = Exposition()
    out.family("hegmd_x", "gauge", "X.").add(value=True)
    assert out.text().endswith("\nhegmd_x 1\n")


@pytest.mark.thorough
@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_each_duration_in_every_bin_that_it_fits(durations: list[float]) -> None:
    histogram = Histogram()
    for duration_s in durations:
        histogram.observe(duration_s)
    for bound, count in histogram.cumulative():
        assert count == sum(duration_s <= bound for duration_s in durations)
    assert histogram.count == len(durations)
    assert histogram.sum_s == pytest.approx(sum(durations))
    out = Exposition()
    out.family("hegmd_x_seconds", "histogram", "X.").add_histogram(histogram, {"op": "gpus"})
    parse(out.text())


@in_one_test(
    "wrong",
    [
        "# HELP hegmd_x X.\n# TYPE hegmd_x gauge\nhegmd_x 1",
        "# HELP hegmd_x X.\nhegmd_x 1\n",
        "# HELP hegmd_x X.\n# TYPE hegmd_x gauge\n",
        "# HELP hegmd_x X.\n# TYPE hegmd_x gauge\nhegmd_y 1\n",
        "# HELP hegmd_x X.\n# TYPE hegmd_x gauge\nhegmd_x 1\nhegmd_x 2\n",
        "# HELP hegmd_x X.\n# TYPE hegmd_x counter\nhegmd_x 1\n",
        "# HELP hegmd_x X.\n# TYPE hegmd_x gauge\nhegmd_x None\n",
        '# HELP hegmd_x X.\n# TYPE hegmd_x gauge\nhegmd_x{a="b"c"} 1\n',
        '# HELP hegmd_x X.\n# TYPE hegmd_x gauge\nhegmd_x{a="b",} 1\n',
        '# HELP hegmd_x X.\n# TYPE hegmd_x histogram\nhegmd_x_bucket{le="1.0"} 1\nhegmd_x_sum 1\nhegmd_x_count 1\n',
    ],
)
def test_the_parser_of_these_tests_refuses_invalid_text(wrong: str) -> None:
    with pytest.raises((AssertionError, StopIteration)):
        parse(wrong)

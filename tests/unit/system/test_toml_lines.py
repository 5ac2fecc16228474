"""Every key of a TOML text is found on its line, however it is written."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd.system.toml_lines import lines_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WRITTEN = '''\
# a comment with [brackets] and "quotes"
top = 1

[plain]
key = "value"   # a comment = with an equals sign
"quoted key" = 'literal # no comment'
'literal.key' = 3
"\\u0065scaped" = true

[ spaced . "out" ]
a.b . c = 1979-05-27 07:32:00
list = [
    "]", # ]
    ["nested", 'also ]'],
    { inside = 1 },
]
after = {x = 1, y.z = "}", deep = { q = [1, 2] }}
text = """
not = a key
[nor] = a table \\"""
two quotes at the end"""""
raw = \'\'\'
still = not a key\'\'\'
last = 1e3

[[many]]
n = 1
[[many]]
n = 2
'''

EXPECTED = {
    ("top",): 2,
    ("plain",): 4,
    ("plain", "key"): 5,
    ("plain", "quoted key"): 6,
    ("plain", "literal.key"): 7,
    ("plain", "escaped"): 8,
    ("spaced",): 10,
    ("spaced", "out"): 10,
    ("spaced", "out", "a"): 11,
    ("spaced", "out", "a", "b"): 11,
    ("spaced", "out", "a", "b", "c"): 11,
    ("spaced", "out", "list"): 12,
    ("spaced", "out", "after"): 17,
    ("spaced", "out", "after", "x"): 17,
    ("spaced", "out", "after", "y"): 17,
    ("spaced", "out", "after", "y", "z"): 17,
    ("spaced", "out", "after", "deep"): 17,
    ("spaced", "out", "after", "deep", "q"): 17,
    ("spaced", "out", "text"): 18,
    ("spaced", "out", "raw"): 22,
    ("spaced", "out", "last"): 24,
    ("many",): 26,
    ("many", "n"): 27,
}


def test_each_spelling_of_a_key_is_found_on_its_line() -> None:
    tomllib.loads(WRITTEN)
    assert lines_of(WRITTEN) == EXPECTED


def test_line_ends_of_windows_count_as_one() -> None:
    assert lines_of(WRITTEN.replace("\n", "\r\n")) == EXPECTED


def test_an_assignment_at_the_end_without_a_newline_is_found() -> None:
    assert lines_of("\n\nkey=1") == {("key",): 3}


@pytest.mark.parametrize("text", ["", "\n", "# only a comment", "  \t\n"])
def test_a_text_without_keys_has_no_lines(text: str) -> None:
    assert lines_of(text) == {}


def paths_of(value: Any, prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    if not isinstance(value, dict):
        return set()
    return {path for key, inner in value.items() for path in {(*prefix, key)} | paths_of(inner, (*prefix, key))}


TEXT_PARTS = st.sampled_from(["a", "b = 1", "[t]", '"', "'", "#", "\\", "]", "}", "{", "=", ",", ".", "\n", " "])
VALUES = st.recursive(
    st.one_of(
        st.integers(-5, 5).map(str),
        st.sampled_from(["true", "1.5", "1979-05-27T07:32:00Z", "07:32:00", "inf"]),
        st.lists(TEXT_PARTS).map(
            lambda parts: '"""' + "".join(parts).replace("\\", "\\\\").replace('"', '\\"') + '"""'
        ),
        st.lists(TEXT_PARTS).map(lambda parts: "'''" + "".join(parts).replace("'", "") + "'''"),
        st.lists(TEXT_PARTS).map(lambda parts: "'" + "".join(parts).replace("'", "").replace("\n", "") + "'"),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[ " + ", # ]\n".join(items) + " ]"),
        st.lists(inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"k{n} = {v}" for n, v in enumerate(items)) + "}"
        ),
    ),
    max_leaves=6,
)


def is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


@pytest.mark.thorough
@given(st.lists(VALUES.filter(lambda value: is_toml(f"k = {value}")), max_size=6))
def test_whatever_the_values_hold_exactly_the_keys_are_found_each_on_its_line(values: list[str]) -> None:
    lines: list[str] = ["[table]"]
    expected: dict[tuple[str, ...], int] = {}
    for number, value in enumerate(values):
        expected[("table", f"key{number}")] = "\n".join(lines).count("\n") + 2
        lines.append(f"key{number} = {value}")
    text = "\n".join(lines)
    found = lines_of(text)
    assert set(found) == paths_of(tomllib.loads(text))
    assert {path: line for path, line in found.items() if path in expected} == expected

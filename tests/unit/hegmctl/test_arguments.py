"""How hegmctl reads a command line, and its messages for mistyped words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmctl.arguments import parse
from hegmctl.grammar import COMMANDS, GLOBAL_OPTIONS
from hegmd.errors import USAGE, HegmError
from hegmd.protocol.names import closest, distance
from tests.cells import in_one_test


@pytest.mark.parametrize(
    "line",
    [
        "ps --gpu gpu0 --json --timeout 5 4711 12",
        "ps --gpu=gpu0 4711 12 --timeout=5 --json",
        "--json --timeout 5s ps --gpu=gpu0 -- 4711 12",
        "--timeout=5 ps 4711 --json 12 --gpu gpu0",
    ],
)
def test_options_may_be_anywhere_and_have_two_spellings(line: str) -> None:
    arguments = parse(line.split())
    assert arguments.row is COMMANDS["ps"]
    assert arguments.flag("json")
    assert not arguments.flag("ways")
    assert arguments.seconds("timeout") == 5.0
    assert arguments.texts("gpu") == ("gpu0",)
    assert arguments.wholes("JOB") == (4711, 12)


@in_one_test(
    ("line", "seconds"),
    [("ps", None), ("ps -w", 2.0), ("ps --watch", 2.0), ("ps -w5", 5.0), ("ps --watch=0.5", 0.5), ("ps -qw=3", 3.0)],
)
def test_an_implied_value_is_taken_unless_another_is_attached(line: str, seconds: float | None) -> None:
    assert parse(line.split()).seconds("watch") == seconds


def test_a_detached_value_is_never_taken_as_the_optional_one() -> None:
    arguments = parse(["ps", "--watch", "4711"])
    assert arguments.seconds("watch") == 2.0
    assert arguments.wholes("JOB") == (4711,)


def test_short_options_can_be_drawn_together() -> None:
    arguments = parse(["events", "-qf"])
    assert arguments.flag("quiet")
    assert arguments.flag("follow")
    assert parse(["ping", "-c3"]).whole("count") == 3
    assert parse(["ping", "-qc", "3"]).whole("count") == 3


def test_an_option_that_repeats_keeps_all_values_and_another_the_last() -> None:
    arguments = parse(["events", "--kind", "gpu", "--kind=process", "--since", "1", "--since", "7"])
    assert arguments.texts("kind") == ("gpu", "process")
    assert arguments.whole("since") == 7


def test_arguments_after_two_dashes_are_passed_on_unchanged() -> None:
    for dashes in (["--"], []):
        parsed = parse(["simulate", "hold", "gpu0", "2GiB", *dashes, "python3", "--json", "--", "-x"])
        assert (parsed.tail, parsed.flag("json")) == (("python3", "--json", "--", "-x"), False)
    arguments = parse(["simulate", "hold", "gpu0", "2GiB", "--", "python3", "--json", "--", "-x"])
    assert arguments.row is COMMANDS["simulate hold"]
    assert arguments.required("GPU") == "gpu0"
    assert arguments.whole("SIZE") == 2 * 1024**3
    assert arguments.tail == ("python3", "--json", "--", "-x")
    assert not arguments.flag("json")


def test_the_path_of_a_socket_need_not_be_utf8() -> None:
    """A frame cannot carry text that is not UTF-8, so hegmctl refuses it. A path of a socket is in no frame."""
    assert parse(["gpus", "--socket", "/tmp/\udcff"]).text("socket") == "/tmp/\udcff"


def test_help_needs_none_of_the_commands_dependencies() -> None:
    assert parse(["simulate", "hold", "--help"]).row is COMMANDS["simulate hold"]
    assert parse(["simulate", "--help"]).group == "simulate"
    assert parse(["-h"]).row is None


@in_one_test(
    ("line", "message", "hint"),
    [
        ("gpsu", "there is no command 'gpsu'", "did you mean `gpus`?"),
        ("event", "there is no command 'event'", "did you mean `events`?"),
        ("doc", "there is no command 'doc'", "did you mean `doctor`?"),
        ("xyzzy", "there is no command 'xyzzy'", "`hegmctl --help` lists the commands"),
        ("simulate holt", "there is no command 'simulate holt'", "did you mean `simulate hold`?"),
        ("ps --wacth", "ps has no option --wacth", "did you mean --watch?"),
        ("ps --josn", "ps has no option --josn", "did you mean --json?"),
        ("ps -x", "ps has no option -x", "`hegmctl ps --help` lists the options"),
        ("--colour gpus", "there is no option --colour", "did you mean --color?"),
        ("-f events", "-f belongs to a command", "write it after events"),
        ("gpus --json=yes", "--json takes no value", "write --json alone"),
        ("gpus --socket", "--socket needs PATH", "write --socket PATH"),
        ("gpus --socket=", "--socket is empty", "give it a value"),
        ("gpus gpu0", "gpus does not take 'gpu0'", "`hegmctl gpus --help` shows what it takes"),
        ("ps -- -5", "JOB -5: a process id is needed", "write it in digits"),
        ("ps 0", "JOB 0: a process id is needed", "write it in digits"),
        ("ping -c 0", "-c 0: a whole number over 0 is needed", "write it in digits"),
        ("events --since -1", "--since -1: a whole number is needed", "write it in digits"),
        ("gpus --timeout 0", "--timeout 0: a number of seconds over 0 is needed", "write it as 5, 0.5 or 10min"),
        ("gpus --timeout nan", "--timeout nan: a number of seconds over 0 is needed", "write it as 5, 0.5 or 10min"),
        ("gpus --timeout -inf", "--timeout -inf: a number of seconds over 0 is needed", "write it as 5, 0.5 or 10min"),
        ("gpus --timeout inf", "--timeout inf: the time is too long", "write at most 1,000,000 seconds"),
        ("ps --watch=1e300", "--watch 1e300: the time is too long", "write at most 1,000,000 seconds"),
        ("ps --watch=1000001", "--watch 1000001: the time is too long", "write at most 1,000,000 seconds"),
        (f"ps {10**20}", f"JOB {10**20}: the number is too large", "write one of at most 9007199254740992"),
        (
            f"events --since {2**53 + 1}",
            f"--since {2**53 + 1}: the number is too large",
            "write one of at most 9007199254740992",
        ),
        ("simulate hold gpu0 9000TiB", "SIZE 9000TiB: more than any GPU has", "write a size below 8 PiB"),
        ("simulate hold gpu0", "simulate hold needs SIZE", "`hegmctl simulate hold --help` explains it"),
        ("simulate hold gpu0 much", "SIZE much: a size such as 2GiB is needed", "write bytes, or a number with"),
        ("simulate hold gpu0 1GiB --", "there is no COMMAND after `--`", "write the COMMAND, or leave `--` out"),
        ("simulate hold gpu0 1GiB -- ", "the COMMAND is empty", "name the program to run"),
        ("ps --gpu \udcff", "--gpu \udcff is not UTF-8", "write it as the daemon shows it"),
        ("simulate fault gpu0 lsot", "FAULT cannot be 'lsot'", "did you mean lost?"),
        ("-- gpus", "a command is needed before `--`", "`hegmctl --help` lists the commands"),
    ],
)
def test_every_mistake_is_reported_with_its_remedy(line: str, message: str, hint: str) -> None:
    with pytest.raises(HegmError) as raised:
        parse(line.split(" "))
    assert raised.value.code is USAGE
    assert raised.value.message == message
    assert raised.value.hint.startswith(hint)


_WORDS = [name for option in GLOBAL_OPTIONS for name in option.names]
_WORDS += [name for command in COMMANDS.values() for option in command.options for name in option.names]
_WORDS += [word for name in COMMANDS for word in name.split()] + [
    "--",
    "-",
    "",
    "4711",
    "gpu0",
    "2GiB",
    "=",
    "--=",
    "-qqh",
]


@pytest.mark.thorough
@given(st.lists(st.one_of(st.sampled_from(_WORDS), st.text(max_size=8)), max_size=8))
def test_any_words_are_read_or_refused_with_a_usage_error(words: list[str]) -> None:
    refused: HegmError | None = None
    command = None
    try:
        command = parse(words).row
    except HegmError as error:
        refused = error
    assert refused is None or refused.code is USAGE
    assert command is None or command.name in COMMANDS


@in_one_test(
    ("first", "second", "edits"),
    [("", "", 0), ("a", "", 1), ("gpus", "gpsu", 1), ("watch", "wacth", 1), ("ps", "gpus", 2), ("abc", "abc", 0)],
)
def test_distance_counts_a_swap_as_one_edit(first: str, second: str, edits: int) -> None:
    assert distance(first, second) == edits
    assert distance(second, first) == edits


def test_only_similar_words_are_suggested() -> None:
    assert closest("frobnicate", list(COMMANDS)) is None

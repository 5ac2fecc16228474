"""The variables of HeGM 0.3, with its defaults, and what may be reached from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmcompat.surroundings import MIN_POLL_S, is_loopback, read_surroundings, require_token_off_loopback
from hegmd.errors import HegmError
from tests.cells import in_one_test

TOKEN = "0123456789abcdef"


def test_without_variables_everything_is_as_hegm_has_it_but_the_address() -> None:
    found = read_surroundings({})
    assert found.state_of(7) == Path("/checkpoint/7/latest.pt")
    assert found.lock_of(7) == Path("/checkpoint/7/lock")
    assert (found.exit_code, found.poll_interval_s, found.checkpoint_limit_s) == (99, 1.0, 300.0)
    assert (found.host, found.port, found.token) == ("127.0.0.1", 8298, None)


def test_each_environment_variable_is_read() -> None:
    found = read_surroundings(
        {
            "HEGM_CHECKPOINT_DIR": "/data",
            "HEGM_EXIT_CODE": "42",
            "HEGM_POLL_INTERVAL": "0.25",
            "HEGM_CTRL_CHECKPOINT_TIMEOUT": "7",
            "HEGM_CTRL_HOST": "::1",
            "HEGM_CTRL_PORT": "9000",
            "HEGM_CTRL_TOKEN": TOKEN,
            "HEGM_LOG_LEVEL": "quiet",
        }
    )
    assert found.lock_of(7) == Path("/data/7/lock")
    assert (found.exit_code, found.poll_interval_s, found.checkpoint_limit_s) == (42, 0.25, 7.0)
    assert (found.host, found.port, found.token, found.is_quiet) == ("::1", 9000, TOKEN, True)


def test_a_pause_of_0_was_refused_and_is_a_short_one() -> None:
    """Issue 14, row 7: HeGM accepts it, and polls without a pause."""
    found = read_surroundings({"HEGM_POLL_INTERVAL": "0", "HEGM_CTRL_CHECKPOINT_TIMEOUT": "0"})
    assert found.poll_interval_s == MIN_POLL_S > 0
    assert found.checkpoint_limit_s == 0


def test_a_named_path_is_everybodys() -> None:
    found = read_surroundings({"HEGM_CHECKPOINT_PATH": "/data/mine.pt"})
    assert found.state_of(7) == Path("/data/mine.pt")
    assert found.lock_of(7) == Path("/data/lock")


@in_one_test(
    ("name", "text"),
    [
        ("HEGM_EXIT_CODE", "0"),
        ("HEGM_EXIT_CODE", "256"),
        ("HEGM_EXIT_CODE", "ninety"),
        ("HEGM_CTRL_PORT", "65536"),
        ("HEGM_POLL_INTERVAL", "-1"),
        ("HEGM_POLL_INTERVAL", "nan"),
        ("HEGM_POLL_INTERVAL", "1e300"),
        ("HEGM_CTRL_CHECKPOINT_TIMEOUT", "-1"),
        ("HEGM_CHECKPOINT_PATH", "/"),
        ("HEGM_CHECKPOINT_PATH", "/data/lock"),
    ],
)
def test_a_value_that_cannot_be_is_named(name: str, text: str) -> None:
    with pytest.raises(HegmError, match=name):
        read_surroundings({name: text})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_no_token_is_needed(host: str) -> None:
    assert is_loopback(host)
    require_token_off_loopback(host, None)


@in_one_test("host", ["0.0.0.0", "::", "10.0.0.7", "", "node7.example"])
def test_elsewhere_it_does_not_start_without_a_token(host: str) -> None:
    with pytest.raises(HegmError, match="HEGM_CTRL_TOKEN"):
        require_token_off_loopback(host, None)
    require_token_off_loopback(host, TOKEN)


@pytest.mark.parametrize("token", ["short", "0123456789abcdef\n", "0123456789abcdé"])
def test_a_token_that_is_invalid_in_a_header_or_easy_to_guess_is_refused(token: str) -> None:
    with pytest.raises(HegmError, match="HEGM_CTRL_TOKEN"):
        require_token_off_loopback("127.0.0.1", token)

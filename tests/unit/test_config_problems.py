"""Messages about a bad configuration: every problem together, each with its line, the reason, and a correction."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd.config import load
from hegmd.errors import BAD_CONFIG, HegmError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hegmd.toml"


def complaints(file: Path, text: str | bytes, **environ: str) -> list[str]:
    """The lines of the error that this configuration gives, with the path taken out."""
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(HegmError) as caught:
        load(path=str(file), environ=environ)
    assert caught.value.code is BAD_CONFIG
    lines = caught.value.message.splitlines()
    assert len(caught.value.facts["problems"]) == len(lines)  # type: ignore[arg-type]  # a list, by construction
    assert "--check-config" in caught.value.hint
    return [line.replace(str(file), "FILE") for line in lines]


def test_all_problems_are_reported_together_in_the_order_of_the_file(file: Path) -> None:
    text = """\
# hegmd
[inventory]
refresh = 5
query_deadline_s = "1"

[demon]
socket = "/x"

[limits]
clients = 0
requests_in_flight = 1.5

[log]
format = "xml"
"""
    numbers, words = "write a whole number from 1 to", 'write one of "auto", "journal", "json", "text"'
    assert [
        complaint.split("; ")
        for complaint in complaints(file, text, HEGM_LOG_FORMAT="verbose", HEGM_SOCKET="/" + "x" * 120)
    ] == [
        ["FILE:3: there is no setting inventory.refresh", "did you mean inventory.refresh_s?"],
        [
            "FILE:4: inventory.query_deadline_s: a number is needed, not text",
            "write a number from 0.05 to 10, without quotes",
        ],
        ["FILE:6: there is no section [demon]", "did you mean [daemon]?"],
        ["FILE:10: limits.clients: 0 is out of bounds", f"{numbers} 65536"],
        [
            "FILE:11: limits.requests_in_flight: a whole number is needed, not a number with a fraction",
            "write a whole number from 32 to 1024",
        ],
        ['FILE:14: log.format: "xml" is not one of its values', words],
        [
            "HEGM_SOCKET in the environment: the path is 121 bytes long and 107 is the most",
            "write an absolute path of at most 107 bytes",
        ],
        ['HEGM_LOG_FORMAT in the environment: "verbose" is not one of its values', words],
    ]


CAUSES = 'write a list of any of "uncorrected", "corrected", "rows", "link", "driver", such as ["uncorrected"], or []'


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("refresh_s = 1", "1: there is no setting refresh_s", "did you mean inventory.refresh_s?"),
        ("[log]\nport = 1", "2: there is no setting log.port", "did you mean metrics.port?"),
        ("[log]\ncolour = true", "2: there is no setting log.colour", "in [log] there are level, format"),
        (
            "colour = true",
            "1: there is no setting colour",
            "write settings below the name of their section, such as [log]",
        ),
        ('[log]\n"a\\nb" = 1', '2: there is no setting log."a\\nb"', "in [log] there are level, format"),
        ('["l.og"]', '1: there is no section ["l.og"]', "did you mean [log]?"),
        (
            '[log]\nlevel = "a\\nb"',
            '2: log.level: "a\\nb" is not one of its values',
            'write one of "debug", "info", "warning", "error"',
        ),
        (
            "[zzz]\n",
            "1: there is no section [zzz]",
            "there are "
            + ", ".join(f"[{name}]" for name in ("daemon", "inventory", "limits", "log", "audit", "metrics"))
            + ", [events], [doctor], [pool], [images], [quiesce], [other_processes], [restart], [sharing], [evacuate]",
        ),
        ('[evacuate]\non = ["ecc"]', '2: evacuate.on: "ecc" is not one of its values', CAUSES),
        ('[evacuate]\non = "rows"', "2: evacuate.on: a list is needed, not text", CAUSES),
        ("[evacuate]\non = [[7]]", "2: evacuate.on: a list is not one of its values", CAUSES),
        ('log = "debug"', "1: log is a section, not text", "write [log], and its settings on the lines below"),
        ("[[log]]\n", "1: log is a section, not a list", "write [log], and its settings on the lines below"),
        (
            "[log.level]\n",
            "1: log.level: a table is not one of its values",
            'write one of "debug", "info", "warning", "error"',
        ),
        (
            "[audit]\nfile = true",
            "2: audit.file: a path is needed, not true or false",
            'write an absolute path, or "" for none',
        ),
        (
            "[metrics]\nport = true",
            "2: metrics.port: a whole number is needed, not true or false",
            "write a whole number from 0 to 65535",
        ),
        (
            "[metrics]\nport = 1970-01-01",
            "2: metrics.port: a whole number is needed, not a date or time",
            "write a whole number from 0 to 65535",
        ),
        (
            "[inventory]\nrefresh_s = nan",
            "2: inventory.refresh_s: nan is out of bounds",
            "write a number from 1 to 3600",
        ),
        (
            "[inventory]\nrefresh_s = inf",
            "2: inventory.refresh_s: inf is out of bounds",
            "write a number from 1 to 3600",
        ),
        (
            '[daemon]\nsocket = "hegmd.sock"',
            '2: daemon.socket: "hegmd.sock" is not an absolute path',
            "write an absolute path of at most 107 bytes",
        ),
        (
            '[daemon]\nsocket = ""',
            '2: daemon.socket: "" is not an absolute path',
            "write an absolute path of at most 107 bytes",
        ),
        (
            '[daemon]\nstate_dir = "/a\\u0000b"',
            '2: daemon.state_dir: "/a\\u0000b" is not an absolute path',
            "write an absolute path",
        ),
        (
            '[metrics]\ntextfile = "/t/hegmd.txt"',
            '2: metrics.textfile: "/t/hegmd.txt" is not the path of such a file',
            'write an absolute path that ends in .prom, or "" for none',
        ),
        (
            "[daemon]\nsocket_mode = 660",
            "2: daemon.socket_mode: permissions are needed as text, not a whole number",
            'write it as text, such as "0660"',
        ),
        (
            '[daemon]\nsocket_mode = "rw-rw----"',
            '2: daemon.socket_mode: "rw-rw----" is not a mode of three octal digits',
            'write it as text, such as "0660"',
        ),
        (
            '[daemon]\nsocket_mode = "0066"',
            '2: daemon.socket_mode: "0066" would deny access to the daemon itself',
            "let the first digit be 6 or 7",
        ),
        (
            '[daemon]\ngroup = "a:b"',
            "2: daemon.group: the name of a group is needed",
            'write it as text, such as "hegm"',
        ),
    ],
)
def test_one_line_names_place_fault_and_remedy(file: Path, text: str, what: str, hint: str) -> None:
    assert complaints(file, text) == [f"FILE:{what}; {hint}"]


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("[log]\nlevel = debug\n", "FILE:2: is not TOML: "),
        ("[log]\nlevel = 'debug'\nlevel = 'info'\n", "FILE:3: is not TOML: cannot overwrite a value"),
        ("[log]\n[audit]\n[log]\n", "FILE:3: is not TOML: "),
        ("[log]\nlevel = '''debug\n\n", "FILE:2: is not TOML: "),
        ("\n\nx = 0xg", "FILE:3: is not TOML: "),
        (b"[log]\n# gr\xfc\xdfe\n", "FILE:2: byte 10 (0xfc) is not UTF-8; save the file as UTF-8"),
        (b"[log]\x00\n", "FILE:1: is not TOML: "),
        ("x = " + "9" * 5000, "FILE: is not TOML: "),
        ("x = " + "[" * 50000, "FILE: is not TOML: "),
        ("#" * (1 << 20) + "#", "FILE: is larger than 1048576 bytes; name hegmd's own file"),
    ],
)
def test_invalid_toml_is_reported_with_its_line(file: Path, text: str | bytes, beginning: str) -> None:
    [complaint] = complaints(file, text)
    assert complaint.startswith(beginning)


def test_a_syntax_error_does_not_hide_other_faults(file: Path) -> None:
    assert len(complaints(file, "[", HEGM_LOG_LEVEL="x")) == 2


def test_a_byte_order_mark_and_line_ends_of_windows_do_not_move_lines(file: Path) -> None:
    assert complaints(file, b'\xef\xbb\xbf[log]\r\nlevel = "x"\r\n')[0].startswith("FILE:2: ")


PIECES = st.sampled_from(
    ["[", "]", "[log]\n", "level", "=", '"debug"', "'", '"""', "#", "\n", "{", "}", ",", ".", "1", "-", "\\", "\r", "é"]
)


@pytest.mark.thorough
@given(st.one_of(st.binary(max_size=60), st.lists(PIECES, max_size=25).map(lambda parts: "".join(parts).encode())))
def test_no_file_whatever_is_in_it_does_more_than_be_refused(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        refused: HegmError | None = None
        try:
            load(path=file.name, environ={})
        except HegmError as error:
            refused = error
        if refused is not None:
            assert refused.code is BAD_CONFIG
            assert all(line.startswith(file.name) for line in refused.message.splitlines())

"""The configuration: what wins, what is refused in which words, what a reload changes, and the shipped example."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd import arguments
from hegmd.config import Config, after_reload, changes, example, load
from hegmd.errors import BAD_CONFIG, HegmError
from hegmd.settings import ROWS, Amount, GroupName, LimitSettings, Mode, OneOf, PathName

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hegmd.toml"


def loaded(file: Path, text: str | bytes, **environ: str) -> Config:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(path=str(file), environ=environ)


def complaints(file: Path, text: str | bytes, **environ: str) -> list[str]:
    """The lines of the error that this configuration gives, with the path taken out."""
    with pytest.raises(HegmError) as caught:
        loaded(file, text, **environ)
    assert caught.value.code is BAD_CONFIG
    lines = caught.value.message.splitlines()
    assert len(caught.value.facts["problems"]) == len(lines)  # type: ignore[arg-type]  # a list, by construction
    assert "--check-config" in caught.value.hint
    return [line.replace(str(file), "FILE") for line in lines]


def test_without_a_file_everything_is_at_the_default_of_a_system_daemon() -> None:
    config = load(environ={"HEGM_CONFIG": ""})
    assert config.daemon.socket == Path("/run/hegm/hegmd.sock")
    assert config.daemon.state_dir == Path("/var/lib/hegm")
    assert config.daemon.group == "hegm"
    assert config.daemon.socket_mode == 0o660
    assert config.limits == LimitSettings()
    assert config.audit.file is None
    assert set(config.sources.values()) == {"default"}


def test_a_private_daemon_has_its_paths_in_the_users_own_directories(tmp_path: Path) -> None:
    given = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/run/user/77", "XDG_STATE_HOME": "/states/"}
    config = load(user_mode=True, environ=given)
    assert config.daemon.socket == Path("/run/user/77/hegm/hegmd.sock")
    assert config.daemon.state_dir == Path("/states/hegm")
    assert config.daemon.group == ""
    assert config.daemon.socket_mode == 0o600
    assert config.path is None


def test_xdg_names_that_are_unset_or_relative_fall_back_to_what_xdg_says(tmp_path: Path) -> None:
    config = load(user_mode=True, environ={"HOME": str(tmp_path), "XDG_STATE_HOME": "relative"})
    assert config.daemon.socket == Path(f"/run/user/{os.getuid()}/hegm/hegmd.sock")
    assert config.daemon.state_dir == tmp_path / ".local/state/hegm"


def test_the_users_own_file_is_read_in_user_mode(tmp_path: Path) -> None:
    own = tmp_path / ".config/hegm/hegmd.toml"
    own.parent.mkdir(parents=True)
    own.write_text("[events]\nremembered = 7\n")
    config = load(user_mode=True, environ={"HOME": str(tmp_path)})
    assert config.events.remembered == 7
    assert config.path == own


def test_argument_wins_over_environment_over_file_over_default(file: Path) -> None:
    file.write_text('[log]\nlevel = "error"\nformat = "json"\n[daemon]\nstate_dir = "/file"\nsocket = "/file.sock"\n')
    environ = {"HEGM_CONFIG": str(file), "HEGM_LOG_LEVEL": "debug", "HEGM_STATE_DIR": "/env", "HEGM_SOCKET": "/e.sock"}
    config = load(environ=environ, arguments={"daemon.socket": "/argument.sock"})
    assert config.path == file
    found = {key: (str(config.value(key)), config.sources[key]) for key in ("daemon.socket", "daemon.state_dir")}
    assert found == {"daemon.socket": ("/argument.sock", "argument"), "daemon.state_dir": ("/env", "environment")}
    assert (config.log.level, config.sources["log.level"]) == ("debug", "environment")
    assert (config.log.format, config.sources["log.format"]) == ("json", "file")
    assert config.sources["events.remembered"] == "default"


def test_a_path_on_the_command_line_or_in_the_environment_may_be_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    config = load(path="c.toml", environ={"HEGM_STATE_DIR": "state"}, arguments={"daemon.socket": "x.sock"})
    assert config.path == tmp_path / "c.toml"
    assert config.daemon.socket == tmp_path / "x.sock"
    assert config.daemon.state_dir == tmp_path / "state"


def test_values_arrive_in_the_types_that_the_program_uses(file: Path) -> None:
    text = """
    audit = { file = "/var/log/hegm/audit.jsonl" }
    metrics.port = 9469
    metrics.textfile = "/textfiles/hegmd.prom"
    [daemon]
    socket_mode = "666"
    [inventory]
    refresh_s = 5
    """
    config = loaded(file, text)
    assert config.audit.file == Path("/var/log/hegm/audit.jsonl")
    assert config.metrics.textfile == Path("/textfiles/hegmd.prom")
    assert config.metrics.port == 9469
    assert config.daemon.socket_mode == 0o666
    assert type(config.inventory.refresh_s) is float


def test_every_problem_is_told_at_once_in_the_order_of_the_file(file: Path) -> None:
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
            "write a number from 0.05 to 60, without quotes",
        ],
        ["FILE:6: there is no section [demon]", "did you mean [daemon]?"],
        ["FILE:10: limits.clients: 0 is out of bounds", f"{numbers} 65536"],
        [
            "FILE:11: limits.requests_in_flight: a whole number is needed, not a number with a fraction",
            f"{numbers} 1024",
        ],
        ['FILE:14: log.format: "xml" is not one of its values', words],
        [
            "HEGM_SOCKET in the environment: the path is 121 bytes long and 107 is the most",
            "write an absolute path of at most 107 bytes",
        ],
        ['HEGM_LOG_FORMAT in the environment: "verbose" is not one of its values', words],
    ]


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("refresh_s = 1", "1: there is no setting refresh_s", "did you mean inventory.refresh_s?"),
        ("[log]\nport = 1", "2: there is no setting log.port", "did you mean metrics.port?"),
        ("[log]\ncolour = true", "2: there is no setting log.colour", "in [log] there are level, format"),
        (
            "colour = true",
            "1: there is no setting colour",
            "settings stand below the name of their section, such as [log]",
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
            "there are [daemon], [inventory], [limits], [log], [audit], [metrics], [events], [doctor]",
        ),
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
            '2: daemon.socket_mode: "0066" shuts out the daemon itself',
            "let the first digit be 6 or 7",
        ),
        (
            '[daemon]\ngroup = "a:b"',
            "2: daemon.group: the name of a group is needed",
            'write it as text, such as "hegm"',
        ),
    ],
)
def test_one_line_says_where_what_and_what_to_write_instead(file: Path, text: str, what: str, hint: str) -> None:
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
def test_what_is_no_toml_is_told_with_its_line(file: Path, text: str | bytes, beginning: str) -> None:
    [complaint] = complaints(file, text)
    assert complaint.startswith(beginning)


def test_a_syntax_error_does_not_hide_what_is_wrong_elsewhere(file: Path) -> None:
    assert len(complaints(file, "[", HEGM_LOG_LEVEL="x")) == 2


def test_a_byte_order_mark_and_line_ends_of_windows_are_no_obstacle(file: Path) -> None:
    text = b'\xef\xbb\xbf[log]\r\nlevel = "debug"\r\n'
    assert loaded(file, text).log.level == "debug"
    assert complaints(file, text.replace(b"debug", b"x"))[0].startswith("FILE:2: ")


def test_a_file_that_was_named_must_be_there(file: Path) -> None:
    for named in ({"path": str(file), "environ": {}}, {"environ": {"HEGM_CONFIG": str(file)}}):
        with pytest.raises(HegmError, match=re.escape(f"{file}: there is no such file")):
            load(**named)  # type: ignore[arg-type]  # two ways to name it


def test_only_a_regular_file_that_may_be_read_is_read(file: Path, tmp_path: Path) -> None:
    os.mkfifo(file)
    for path, why in (
        (file, "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (file / "below", "cannot be read: Not a directory"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ):
        with pytest.raises(HegmError, match=re.escape(f"{path}: {why}")):
            load(path=str(path), environ={})


@pytest.mark.skipif(os.getuid() != 0, reason="root is needed to become somebody else")
def test_a_file_that_may_not_be_read_is_an_error_even_at_the_default_place(tmp_path: Path) -> None:
    own = tmp_path / "hegm/hegmd.toml"
    own.parent.mkdir()
    own.write_text("")
    own.parent.chmod(0o700)
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(HegmError, match="cannot be read: Permission denied"):
            load(user_mode=True, environ={"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/nonexistent"})
    finally:
        os.seteuid(0)


def test_a_default_that_cannot_work_is_told_unless_something_else_is_given() -> None:
    environ = {"XDG_RUNTIME_DIR": "/" + "long" * 30, "HOME": "/nonexistent"}
    with pytest.raises(HegmError, match=r"default of daemon\.socket: the path is 137 bytes long"):
        load(user_mode=True, environ=environ)
    assert load(user_mode=True, environ={**environ, "HEGM_SOCKET": "/s"}).daemon.socket == Path("/s")


def test_describe_shows_every_setting_as_it_is_written_in_a_file(file: Path) -> None:
    config = loaded(file, '[daemon]\nsocket_mode = "640"\n[metrics]\nport = 1\n')
    described = {setting.key: setting for setting in config.describe()}
    assert list(described) == list(ROWS)
    assert (described["daemon.socket_mode"].value, described["daemon.socket_mode"].source) == ("0640", "file")
    assert (described["metrics.port"].value, described["audit.file"].value) == (1, "")
    assert all(setting.doc.endswith(".") for setting in described.values())
    json.dumps([setting.to_plain() for setting in described.values()])


def test_a_reload_tells_what_changes_now_and_what_waits_for_a_restart(file: Path) -> None:
    old = loaded(file, "[metrics]\nport = 1\n")
    new = loaded(file, '[metrics]\nport = 2\n[log]\nlevel = "debug"\n[events]\nremembered = 1000\n')
    assert changes(old, new) == (("log.level",), ("metrics.port",))
    merged = after_reload(old, new)
    assert (merged.metrics.port, merged.log.level) == (1, "debug")
    assert (merged.sources["metrics.port"], merged.sources["log.level"]) == ("file", "file")
    assert changes(old, merged) == (("log.level",), ())
    assert changes(merged, new) == ((), ("metrics.port",))


def test_the_shipped_example_is_what_the_table_gives() -> None:
    shipped = (ROOT / "contrib/hegmd.toml").read_text()
    assert shipped == example(), "write it again: python3 -m hegmd.config > contrib/hegmd.toml"
    assert max(map(len, shipped.splitlines())) <= 110


def test_the_shipped_example_changes_nothing_as_it_is_or_uncommented(file: Path) -> None:
    defaults = load(environ={"HEGM_CONFIG": ""})
    text = example()
    assert changes(defaults, loaded(file, text)) == ((), ())
    uncommented, count = re.subn(r"^#(?! )", "", text, flags=re.MULTILINE)
    assert count == len(ROWS)
    config = loaded(file, uncommented)
    assert changes(defaults, config) == ((), ())
    assert set(config.sources.values()) == {"file"}


def test_flags_in_the_table_are_flags_of_the_program() -> None:
    flags = {row.flag for row in ROWS.values() if row.flag}
    assert flags <= {argument.flag for argument in arguments.ARGUMENTS}


def test_what_comes_as_text_from_outside_is_of_a_kind_that_takes_text() -> None:
    for row in ROWS.values():
        if row.flag or row.variable:
            assert isinstance(row.kind, (OneOf, PathName)), row.key


def test_every_row_shows_what_it_parses() -> None:
    for row in ROWS.values():
        assert isinstance(row.kind, (Amount, GroupName, Mode, OneOf, PathName))
        assert row.kind.show(row.kind.parse(row.default)) == row.default, row.key


PIECES = st.sampled_from(
    ["[", "]", "[log]\n", "level", "=", '"debug"', "'", '"""', "#", "\n", "{", "}", ",", ".", "1", "-", "\\", "\r", "é"]
)


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

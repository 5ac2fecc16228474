"""The configuration: what wins, what is refused in which words, what a reload changes, and the shipped example."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from hegmd import __main__ as arguments
from hegmd.config import Config, after_reload, changes, load
from hegmd.errors import HegmError
from hegmd.setting_types import Amount, GroupName, Mode, OneOf, PathName, SomeOf
from hegmd.settings import ROWS, LimitSettings
from tools.docs.settings import example

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hegmd.toml"


def loaded(file: Path, text: str | bytes, **environ: str) -> Config:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(path=str(file), environ=environ)


def test_without_a_file_everything_is_at_the_default_of_a_system_daemon() -> None:
    config = load(environ={"HEGM_CONFIG": ""})
    assert config.daemon.socket == Path("/run/hegm/hegmd.sock")
    assert config.daemon.state_dir == Path("/var/lib/hegm")
    assert config.daemon.group == "hegm"
    assert config.daemon.socket_mode == 0o660
    assert config.limits.frame_bytes == LimitSettings().frame_bytes
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


def test_unset_or_relative_xdg_variables_fall_back_to_the_standard_paths(tmp_path: Path) -> None:
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


def test_a_byte_order_mark_and_line_ends_of_windows_are_no_obstacle(file: Path) -> None:
    assert loaded(file, b'\xef\xbb\xbf[log]\r\nlevel = "debug"\r\n').log.level == "debug"


def test_a_file_that_was_named_must_be_there(file: Path) -> None:
    for named in ({"path": str(file), "environ": {}}, {"environ": {"HEGM_CONFIG": str(file)}}):
        with pytest.raises(HegmError, match=re.escape(f"{file}: there is no such file")):
            load(**named)


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


def test_an_unusable_default_is_reported_unless_another_value_is_given() -> None:
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


def test_a_reload_reports_what_changes_now_and_what_needs_a_restart(file: Path) -> None:
    old = loaded(file, "[metrics]\nport = 1\n")
    new = loaded(file, '[metrics]\nport = 2\n[log]\nlevel = "debug"\n[events]\nremembered = 1000\n')
    assert changes(old, new) == (("log.level",), ("metrics.port",))
    merged = after_reload(old, new)
    assert (merged.metrics.port, merged.log.level) == (1, "debug")
    assert (merged.sources["metrics.port"], merged.sources["log.level"]) == ("file", "file")
    assert changes(old, merged) == (("log.level",), ())
    assert changes(merged, new) == ((), ("metrics.port",))


def test_the_shipped_example_equals_the_tables_output() -> None:
    shipped = (ROOT / "contrib/hegmd.toml").read_text()
    assert shipped == example(), "write it again: python3 -m tools.docs.settings"
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


def test_settings_from_outside_have_types_that_parse_text() -> None:
    for row in ROWS.values():
        if row.flag or row.variable:
            assert isinstance(row.kind, (OneOf, PathName)), row.key


def test_every_row_prints_its_parsed_value() -> None:
    for row in ROWS.values():
        assert isinstance(row.kind, (Amount, GroupName, Mode, OneOf, PathName, SomeOf))
        assert row.kind.show(row.kind.parse(row.default)) == row.default, row.key

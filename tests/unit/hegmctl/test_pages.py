"""Manual pages and the reference of the JSON output: complete, well formed, and fresh."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hegmcompat import control, ctrl_cli
from hegmcompat.surroundings import LOCK, REFUSED, VARIABLES
from hegmctl.grammar import COMMANDS, GLOBAL_OPTIONS
from hegmctl.help import shown_commands
from hegmd.__main__ import ARGUMENTS
from hegmd.errors import CODES
from hegmd.settings import ROWS
from tests.cells import in_one_test
from tests.unit.hegmctl.running import ROOT, environment
from tools.docs.hegmctl.json_reference import BEGIN, _reachable, printed, reference, refreshed
from tools.docs.hegmctl.library_stub import stub
from tools.docs.hegmctl.manual import manual_pages
from tools.docs.hegmctl.roff import literal, prose

PAGES = manual_pages("2026-11-21")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_well_formed(name: str, tmp_path: Path) -> None:
    page = tmp_path / name
    page.write_text(PAGES[name])
    checked = False
    for program in (["mandoc", "-Tlint", "-Wstyle"], ["groff", "-ww", "-man", "-Tutf8", "-z"]):
        if shutil.which(program[0]):
            output = subprocess.run([*program, str(page)], capture_output=True, text=True, check=False)
            assert output.stdout + output.stderr == ""
            checked = True
    if not checked:
        pytest.skip("neither mandoc nor groff is installed")


def test_the_pages_name_everything() -> None:
    client = PAGES["hegmctl.1"]
    for command in shown_commands():
        assert f".SS hegmctl {literal(command.name)}" in client
        for option in command.options:
            assert all(literal(name) in client for name in option.names)
    assert all(literal(name) in client for option in GLOBAL_OPTIONS for name in option.names)
    assert all(f"\n{code.exit_status}\n{code.name}: " in client for code in CODES)
    assert "__complete" not in client
    assert all(literal(argument.flag) in PAGES["hegmd.8"] for argument in ARGUMENTS)
    for key, row in ROWS.items():
        assert f"\\fB{literal(key.split('.')[1])} = " in PAGES["hegmd.toml.5"]
        assert prose(row.doc)[0] in PAGES["hegmd.toml.5"]


@in_one_test(
    ("text", "lines"),
    [
        ("plain", ["plain"]),
        ("use `--json` now", ["use \\fB\\-\\-json\\fR now"]),
        (".hidden begins", ["\\&.hidden begins"]),
        ("'quoted' too", ["\\&'quoted' too"]),
        (r"a \ backslash", ["a \\(rs backslash"]),
        ("`it's`", ["\\fBit\\(aqs\\fR"]),
    ],
)
def test_text_is_escaped_in_markup(text: str, lines: list[str]) -> None:
    assert prose(text) == lines


def _run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.docs.hegmctl", *words],
        env=environment(**environ),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_the_pages_of_hegms_programs_have_all_that_they_take_read_and_answer() -> None:
    launcher, ctrl = PAGES["hegm-launcher.1"], PAGES["hegm-ctrl.1"]
    assert all(literal(name) in launcher + ctrl for name in VARIABLES)
    for command in ctrl_cli.COMMANDS:
        assert f".SS {literal(f'hegm-ctrl {command.name}')}" in ctrl
        assert all(literal(flag) in ctrl for option in command.options for flag in option.flags)
    words = [value for name, value in vars(control).items() if name.isupper() and name[0] != "_" and type(value) is str]
    words = [word for word in words if word not in (LOCK, REFUSED)]
    assert len(words) == 9
    assert all(literal(word) in ctrl for word in words)


@pytest.mark.thorough
def test_the_same_sources_give_the_same_pages(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert _run("man", str(tmp_path / name), SOURCE_DATE_EPOCH="1795219200").returncode == 0
    made = {path.name: path.read_text() for path in (tmp_path / "a").iterdir()}
    assert set(made) == set(PAGES) == {"hegmctl.1", "hegmd.8", "hegmd.toml.5", "hegm-launcher.1", "hegm-ctrl.1"}
    assert made == {path.name: path.read_text() for path in (tmp_path / "b").iterdir()}
    assert ".TH HEGMCTL 1 2026-11-21 " in made["hegmctl.1"]


@pytest.mark.thorough
def test_completions_are_written_under_the_names_that_shells_expect(tmp_path: Path) -> None:
    assert _run("completions", str(tmp_path / "deep" / "er")).returncode == 0
    assert {path.name for path in (tmp_path / "deep" / "er").iterdir()} == {"hegmctl.bash", "_hegmctl", "hegmctl.fish"}


@pytest.mark.thorough
def test_a_wrong_call_is_refused_with_the_right_form(tmp_path: Path) -> None:
    ran = _run("pages", str(tmp_path))
    assert ran.returncode == 2
    assert "man|completions DIRECTORY" in ran.stderr


def test_the_reference_of_the_json_output_is_fresh() -> None:
    text = (ROOT / "docs" / "json.md").read_text()
    assert text == refreshed(text), "write it anew: python3 -m tools.docs.hegmctl json docs/json.md"
    with pytest.raises(ValueError, match="is missing"):
        refreshed("no mark")
    assert refreshed(f"mine\n{BEGIN}\nold") == f"mine\n{BEGIN}\n\n{reference()}"


def test_the_librarys_type_stubs_are_fresh() -> None:
    text = (ROOT / "client" / "hegmctl" / "library.pyi").read_text()
    assert text == stub(), "write it anew: python3 -m tools.docs.hegmctl stub client/hegmctl/library.pyi"


def test_the_reference_covers_every_command_that_answers() -> None:
    answering = {command.split(" --")[0].removesuffix(" JOB") for command, _record, _how in printed()}
    silent = {"help", "top"}  # they explain, and draw a screen
    assert answering == {command.name for command in COMMANDS.values() if not command.hidden} - silent


def test_no_record_has_a_field_of_the_name_that_the_output_adds() -> None:
    for record in _reachable():
        assert "schema" not in {field.name for field in record.fields}, record.__name__

"""Texts for people: documents whose links exist, a change log, and no trace of one developer's machine."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.cells import in_one_test
from tests.house.source import ROOT, files
from tools import messages

DOCUMENTS = files(".md")
# Everything that is text and ours; test vectors and pictures are data.
TEXTS = [
    path
    for path in files()
    if path.suffix
    in {".c", ".conf", ".h", ".js", ".json", ".md", ".mjs", ".py", ".service", ".sh", ".socket", ".toml", ""}
]
# Folders that exist on every system: a path under one of them says nothing about a developer.
SYSTEM_FOLDERS = {
    *("/", "/dev/shm", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp", "/usr", "/usr/local"),
    *("/usr/local/src", "/usr/src", "/var", "/var/cache", "/var/lib", "/var/local", "/var/opt", "/var/tmp"),
}


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def own_places(root: Path, home: Path) -> list[str]:
    """Return the place and owner of this checkout: absolute paths that mean nothing on other machines."""
    places = {root, *(parent for parent in root.parents if len(parent.parts) > 1), home}
    return sorted(str(place) for place in places if str(place) not in SYSTEM_FOLDERS)


def mentions(text: str, places: list[str]) -> list[str]:
    """The places that a text names, as whole paths: /job is in «cd /job/x», not in «docs/job/x» or «/jobs»."""
    return [place for place in places if re.search(rf"(?<![\w.\-/}}]){re.escape(place)}(?![\w\-])", text)]


def test_no_file_names_a_place_of_this_machine() -> None:
    places = own_places(ROOT, Path.home())
    found = {_relative(path): mentions(path.read_text(errors="replace"), places) for path in TEXTS}
    assert {path: named for path, named in found.items() if named} == {}


def test_a_name_of_a_private_machine_is_detected() -> None:
    places = ["/checkouts", "/checkouts/hegmd", "/home/ada"]
    assert mentions("run /checkouts/hegmd/tools/x", places) == ["/checkouts", "/checkouts/hegmd"]
    assert mentions('HOME="/home/ada"', places) == ["/home/ada"]
    assert mentions("docs/checkouts/x, /checkoutsmore, $HOME/checkouts, ${X}/checkouts", places) == []


@in_one_test("folder", ["/home/ada", "/opt", "/root", "/tmp", "/usr/local/src", "/var/lib", "/var/tmp", "/srv/a b"])
def test_a_clone_below_a_common_system_folder_used_that_folder_as_its_own(folder: str) -> None:
    """Issue 14, row 22: below /var/tmp, each text that names /var/tmp was an offence."""
    root = Path(folder, "hegmd")
    own = {str(root)} | ({folder} if folder in {"/home/ada", "/srv/a b"} else set())
    assert own_places(root, Path("/root")) == sorted(own)


def _links(text: str) -> list[str]:
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", without_code)


def _anchor(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def broken_links(path: Path, text: str) -> list[str]:
    """Relative links to a file or heading that is not there. Addresses on the network are not asked."""
    broken: list[str] = []
    for link in _links(text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if not file.exists():
            broken.append(link)
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"(?m)^#+ (.*)$", text if file == path else file.read_text())
            if anchor not in {_anchor(heading) for heading in headings}:
                broken.append(link)
    return broken


@in_one_test("path", DOCUMENTS, ids=_relative)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text()) == []


def test_a_broken_link_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One thing\n[a](page.md) [b](#one-thing) [c](https://example.org) `[d](gone.md)`\n")
    assert broken_links(page, page.read_text()) == []
    assert broken_links(page, "[a](gone.md) [b](#two-things) [c](page.md#three)") == [
        "gone.md",
        "#two-things",
        "page.md#three",
    ]


@functools.cache
def _packages() -> tuple[Path, ...]:
    """The folders below which documents name files: the checkout, the daemon and the client."""
    return ROOT, ROOT / "hegmd", ROOT / "client"


@functools.cache
def _folders() -> tuple[str, ...]:
    """The folders directly below one of these that have a file of ours."""
    parents = {path.parent for path in files()}
    below = [parent.relative_to(base) for parent in parents for base in _packages() if parent.is_relative_to(base)]
    return tuple(sorted({path.parts[0] for path in below if path.parts}))


def missing_paths(text: str) -> list[str]:
    """The files and folders of this project that a document names and that do not exist.

    Each word below a folder of the checkout, the daemon or the client counts. In code, a relative path that ends with /
    or .py counts too. `gpu_helper/cuda` may leave out .py, and a pattern has to match a file.
    """
    below = "|".join(map(re.escape, _folders()))
    named = set(re.findall(rf"(?<![\w./\-$}}<>~])(?:{below})/[\w\-.*/]*", text))
    named.update(word for word in re.findall(r"`([a-z_][a-z_.*/]*/[a-z_.*/]*)`", text) if word.endswith(("/", ".py")))
    ends = [word.rstrip(".") for word in sorted(named) if not word.startswith("build/")]  # which a new clone lacks
    return [word for word in ends if not any([*base.glob(word), *base.glob(f"{word}.py")] for base in _packages())]


@in_one_test("path", DOCUMENTS, ids=_relative)
def test_a_document_names_files_that_exist(path: Path) -> None:
    """Issue 15: the table of packages named folders that had been moved."""
    assert missing_paths(path.read_text()) == []


def test_a_path_that_does_not_exist_is_detected() -> None:
    assert (
        missing_paths("`hegmd/node/`, hegmd/app.py, `gpu_helper/cuda`, memory/pool*.py, and `x/lock` or /run/x/") == []
    )
    assert missing_paths("`helper/`, hegmd/pool.py, `gpu_helper/gone`, docs/gone*.md, see hegmd/gone.") == [
        "docs/gone*.md",
        "gpu_helper/gone",
        "hegmd/gone",
        "hegmd/pool.py",
        "helper/",
    ]


def test_the_change_log_has_a_place_for_the_next_change() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"(?m)^## \[?([^\]\n]+?)\]?(?: - (\d{4}-\d{2}-\d{2}))?$", text)
    assert versions
    assert versions[0] == ("Unreleased", "")
    assert all(date for _, date in versions[1:])
    kinds = set(re.findall(r"(?m)^### (.*)$", text))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def quoted_messages(page: str) -> list[str]:
    """Return the messages that the rows of a page explain; an ellipsis in them is a placeholder."""
    return re.findall(r'(?m)^\| "([^"]+)" ', page)


# All files are read for that once.
_messages = functools.cache(messages.messages)


def unknown_messages(quoted: list[str]) -> list[str]:
    """Those of them that no file of the shipped packages can show."""
    texts = [message.text for message in _messages()]
    unknown: list[str] = []
    for words in quoted:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in words.split("…") if part.strip()), re.DOTALL)
        if not any(pattern.search(text) for text in texts):
            unknown.append(words)
    return unknown


@pytest.mark.thorough
@pytest.mark.xdist_group("messages")
def test_each_explained_message_exists() -> None:
    quoted = quoted_messages((ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(quoted) > 20
    assert unknown_messages(quoted) == []


@pytest.mark.thorough
@pytest.mark.xdist_group("messages")
def test_a_removed_message_is_detected() -> None:
    assert unknown_messages(["the pool may hold …", "no such … words anywhere"]) == ["no such … words anywhere"]


def test_messages_are_found_with_their_values_filled_in() -> None:
    raised = 'raise Refused(f"gpu {name} has " + "no room", hint="end a job" if x else None)'
    source = f'"""A docstring with words."""\n{raised}\n'
    found = {(message.kind, message.text) for message in messages.in_source("a.py", source)}
    assert found == {("Refused", "gpu {name} has no room"), ("hint", "end a job")}


def test_a_message_is_found_by_its_printed_form() -> None:
    """Issue 15: a search for a whole message found nothing, because names and numbers in it are filled in."""
    found = [
        messages.Message(f"a.py:{line}", "Refused", text) for line, text in enumerate(("no room", "{who} has no agent"))
    ]
    assert [one.text for one in messages.with_words(found, ["agent", "has"])] == ["{who} has no agent"]
    assert [one.text for one in messages.with_words(found, ["process 4711 has no agent"])] == ["{who} has no agent"]
    assert messages.with_words(found, ["process 4711 has an agent"]) == []


@pytest.mark.thorough
@pytest.mark.xdist_group("messages")
def test_a_whole_message_leads_to_the_file_that_makes_it() -> None:
    found = messages.with_words(_messages(), "process 4711 (train.py) has no agent".split())
    assert found[0].place.startswith("hegmd/migration/plan/members.py:")

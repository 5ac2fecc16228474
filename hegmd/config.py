"""The daemon's configuration: read from its file, environment and command line, and checked as a whole.

Decides which source wins, and reports all problems at once, each with its place and what to write instead. `settings`
has the settings. Only `app` and `__main__` read a Config; other parts get the values they need.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from hegmd.errors import BAD_CONFIG, HegmError
from hegmd.protocol.messages import Setting
from hegmd.setting_types import InvalidSetting, PathName, name_of_type, quoted
from hegmd.settings import (
    ROWS,
    SECTIONS,
    AuditSettings,
    DaemonSettings,
    DoctorSettings,
    EvacuateSettings,
    EventsSettings,
    ImagesSettings,
    InventorySettings,
    LimitSettings,
    LogSettings,
    MetricsSettings,
    OtherProcessesSettings,
    PoolSettings,
    QuiesceSettings,
    RestartSettings,
    Row,
    SharingSettings,
)
from hegmd.system.toml_lines import lines_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SYSTEM_PATH = "/etc/hegm/hegmd.toml"
USER_PATH = "$XDG_CONFIG_HOME/hegm/hegmd.toml"
PATH_VARIABLE = "HEGM_CONFIG"
FILE_BYTES = 1 << 20
XDG_FALLBACKS = {
    "$XDG_RUNTIME_DIR": "/run/user/{uid}",
    "$XDG_STATE_HOME": "{home}/.local/state",
    "$XDG_CONFIG_HOME": "{home}/.config",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Config:
    """Every setting and its source. Made by `load` and never changed."""

    daemon: DaemonSettings
    inventory: InventorySettings
    limits: LimitSettings
    log: LogSettings
    audit: AuditSettings
    metrics: MetricsSettings
    events: EventsSettings
    doctor: DoctorSettings
    pool: PoolSettings
    images: ImagesSettings
    quiesce: QuiesceSettings
    other_processes: OtherProcessesSettings
    restart: RestartSettings
    sharing: SharingSettings
    evacuate: EvacuateSettings
    path: Path | None
    sources: Mapping[str, str]

    def value(self, key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)

    def describe(self) -> tuple[Setting, ...]:
        """Return every setting in the order of the table, for people and other programs."""
        return tuple(
            Setting(key=key, value=row.kind.show(self.value(key)), source=self.sources[key], doc=row.doc)
            for key, row in ROWS.items()
        )


class Problem(NamedTuple):
    """An error in the configuration."""

    where: str
    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.hint}"


def load(
    *,
    path: str | None = None,
    user_mode: bool = False,
    arguments: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read the configuration; an argument wins over the environment, that over the file, and that over the default.

    `path` is a file that was named on the command line, `arguments` has values from there by key. Raises HegmError with
    the code `bad-config`, whose message has a line for each problem.
    """
    gathered = _SettingsReader(os.environ if environ is None else environ)
    found = gathered.take_file(path, user_mode)
    gathered.take_environment()
    gathered.take_arguments(arguments or {})
    gathered.take_defaults(user_mode)
    if gathered.problems:
        raise _bad_config(gathered.problems)
    sections: dict[str, Any] = {
        section: cls(**{each.name: gathered.values[f"{section}.{each.name}"] for each in cls.fields})
        for section, cls in SECTIONS.items()
    }
    return Config(**sections, path=found, sources=gathered.sources)


def _bad_config(problems: list[Problem]) -> HegmError:
    facts = {"problems": [{"where": p.where, "problem": p.what, "hint": p.hint} for p in problems]}
    hint = f"fix {'this' if len(problems) == 1 else 'these'}, then run: hegmd --check-config"
    return HegmError(BAD_CONFIG, "\n".join(str(problem) for problem in problems), hint, facts)


class _SettingsReader:
    """Values from all places, the later over the earlier, and everything that is wrong with any of them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.problems: list[Problem] = []
        self._given: set[str] = set()

    def take_file(self, path: str | None, user_mode: bool) -> Path | None:
        """Read the file. Returns its path, or None if there is none and none is required."""
        named = path or self._environ.get(PATH_VARIABLE)
        file = Path(named or self._fill_in(USER_PATH if user_mode else SYSTEM_PATH)).absolute()
        try:
            text = _read(file)
        except FileNotFoundError:
            if named:
                self._report(str(file), "there is no such file", "name another file, or none to use the defaults")
            return None
        except OSError as error:
            self._report(str(file), f"cannot be read: {error.strerror}", f"look at it with `ls -ld {file}`")
            return None
        except _BadFile as bad:
            self.problems.append(bad.problem)
            return None
        self._take_text(text, file)
        return file

    def take_environment(self) -> None:
        for key, row in ROWS.items():
            if row.variable and self._environ.get(row.variable):
                value = _from_here(row, self._environ[row.variable])
                self._take(key, value, "environment", f"{row.variable} in the environment")

    def take_arguments(self, arguments: Mapping[str, str]) -> None:
        for key, text in arguments.items():
            self._take(key, _from_here(ROWS[key], text), "argument", f"argument {ROWS[key].flag or key}")

    def take_defaults(self, user_mode: bool) -> None:
        """Fill in what nothing else gave. A default can be bad too: the socket's, where XDG_RUNTIME_DIR is long."""
        for key, row in ROWS.items():
            if key not in self._given:
                default = row.user_default if user_mode else row.default
                filled = self._fill_in(default) if isinstance(default, str) else default
                self._take(key, filled, "default", f"default of {key}")

    def _take_text(self, text: str, file: Path) -> None:
        try:
            document: dict[str, object] = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also for numbers and nesting beyond what Python takes
            self.problems.append(_syntax_problem(text, file, error))
            return
        lines = lines_of(text)
        already = len(self.problems)
        line_of: dict[str, int] = {}  # for sorting: the parser returns a table's keys together, wherever they are

        def place(*path: str) -> str:
            where = f"{file}:{lines[path]}"
            line_of[where] = lines[path]
            return where

        for section, content in document.items():
            if section not in SECTIONS:
                self._report(place(section), *_unknown_section(section, content))
            elif not isinstance(content, dict):
                what = f"{section} is a section, not {name_of_type(content)}"
                self._report(place(section), what, f"write [{section}], and its settings on the lines below")
            else:
                for name, value in cast("dict[str, object]", content).items():
                    key, where = f"{section}.{name}", place(section, name)
                    if key in ROWS:
                        self._take(key, value, "file", where)
                    else:
                        self._report(where, *_unknown_setting(section, name))
        self.problems[already:] = sorted(self.problems[already:], key=lambda problem: line_of[problem.where])

    def _take(self, key: str, value: object, source: str, where: str) -> None:
        self._given.add(key)
        try:
            self.values[key] = ROWS[key].kind.parse(value)
            self.sources[key] = source
        except InvalidSetting as unfit:
            self._report(where, f"{key}: {unfit.why}" if source == "file" else unfit.why, unfit.hint)

    def _report(self, where: str, what: str, hint: str) -> None:
        self.problems.append(Problem(where, what, hint))

    def _fill_in(self, text: str) -> str:
        """Replace an XDG name at the front of a default; a relative path in it counts as unset, says XDG."""
        name, slash, rest = text.partition("/")
        if name not in XDG_FALLBACKS:
            return text
        directory = self._environ.get(name[1:], "")
        if not directory.startswith("/"):
            home = self._environ.get("HOME") or os.path.expanduser("~")
            directory = XDG_FALLBACKS[name].format(home=home, uid=os.getuid())
        return directory.rstrip("/") + slash + rest


def _from_here(row: Row, text: str) -> str:
    """Make a relative path from the environment or command line absolute, from the caller's directory."""
    return os.path.abspath(text) if isinstance(row.kind, PathName) and text else text


class _BadFile(Exception):
    """A file that can be read and is no text of ours."""

    def __init__(self, where: str, what: str, hint: str) -> None:
        super().__init__(what)
        self.problem = Problem(where, what, hint)


def _read(file: Path) -> str:
    # Without O_NONBLOCK, opening a FIFO would wait for its writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _BadFile(str(file), "is not a regular file", "name the file itself")
        with open(descriptor, "rb", closefd=False) as opened:
            data = opened.read(FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > FILE_BYTES:
        raise _BadFile(str(file), f"is larger than {FILE_BYTES} bytes", "name hegmd's own file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"byte {error.start} (0x{data[error.start]:02x}) is not UTF-8"
        raise _BadFile(f"{file}:{line}", what, "save the file as UTF-8") from None


def _unknown_section(name: str, content: object) -> tuple[str, str]:
    """Return problem and hint for an unknown name at the top: a misspelt section, or a stray setting."""
    if not isinstance(content, dict):
        return _unknown_setting("", name)
    near = difflib.get_close_matches(name, SECTIONS, 1)
    sections = ", ".join(f"[{section}]" for section in SECTIONS)
    return f"there is no section [{_key(name)}]", f"did you mean [{near[0]}]?" if near else f"there are {sections}"


def _unknown_setting(section: str, name: str) -> tuple[str, str]:
    """Return problem and hint for an unknown setting: the one of that name elsewhere, or the nearest one."""
    inside = [row.name for row in ROWS.values() if row.section == section]
    elsewhere = {row.name: row.key for row in ROWS.values()}
    near = difflib.get_close_matches(name, inside, 1)
    far = difflib.get_close_matches(name, elsewhere, 1, 0.75)
    what = f"there is no setting {_key(section, name) if section else _key(name)}"
    if name not in elsewhere and near:
        return what, f"did you mean {section}.{near[0]}?"
    if far:
        return what, f"did you mean {elsewhere[far[0]]}?"
    if section:
        return what, f"in [{section}] there are {', '.join(inside)}"
    return what, "write settings below the name of their section, such as [log]"


def _key(*parts: str) -> str:
    """Return a dotted key in TOML's form."""
    return ".".join(part if re.fullmatch("[A-Za-z0-9_-]+", part) else quoted(part) for part in parts)


def _syntax_problem(text: str, path: Path, error: Exception) -> Problem:
    """Return the problem of a syntax error. The parser reports the place in words only, and sometimes not at all."""
    message = str(error) or "nested too deeply"
    place = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    hint = "write text in quotes, numbers and true or false without, and each key once"
    if place is None:
        return Problem(str(path), f"is not TOML: {message}", hint)
    line = int(place[1]) if place[1] else text.rstrip("\n").count("\n") + 1
    column = f" at column {place[2]}" if place[2] else " at the end of the file"
    what = message[: place.start()]
    return Problem(f"{path}:{line}", f"is not TOML: {what[:1].lower()}{what[1:]}{column}", hint)


def changes(old: Config, new: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys whose values differ: those that take effect at once, and those that need a restart."""
    differ = [row for key, row in ROWS.items() if old.value(key) != new.value(key)]
    return tuple(row.key for row in differ if row.reloads), tuple(row.key for row in differ if not row.reloads)


def after_reload(old: Config, new: Config) -> Config:
    """Return the configuration after a reload: settings that need a restart keep their old values."""
    merged: dict[str, Any] = {}
    for section in SECTIONS:
        kept = {row.name: old.value(row.key) for row in ROWS.values() if row.section == section and not row.reloads}
        merged[section] = getattr(new, section).replace(**kept)
    sources = {key: (new if row.reloads else old).sources[key] for key, row in ROWS.items()}
    return Config(**merged, path=new.path, sources=sources)

"""The manual pages hegmctl(1), hegmd(8) and hegmd.toml(5), and the list of all."""

from __future__ import annotations

from hegmctl.grammar import DESCRIPTION, GLOBAL_OPTIONS, PROGRAM, SUMMARY
from hegmctl.grammar.words import Option
from hegmctl.help import SOCKET_ORDER, option_forms, sentence, shown_commands, usage
from hegmd import __main__ as daemon_arguments
from hegmd import __version__
from hegmd.errors import CODES
from hegmd.settings import ROWS, SECTIONS, Row
from tools.docs.hegmctl.hegm_manual import ctrl_page, launcher_page
from tools.docs.hegmctl.roff import Page
from tools.docs.settings import toml_of

_SOURCE = f"hegm {__version__}"


def manual_pages(day: str) -> dict[str, str]:
    """Every page under its file name. `day` is the date that they bear."""
    return {
        "hegmctl.1": client_page(day),
        "hegmd.8": daemon_page(day),
        "hegmd.toml.5": configuration_page(day),
        "hegm-launcher.1": launcher_page(day),
        "hegm-ctrl.1": ctrl_page(day),
    }


def client_page(day: str) -> str:
    """hegmctl(1)."""
    page = Page("hegmctl", 1, day, _SOURCE, "User Commands")
    page.name(PROGRAM, SUMMARY)
    page.section("SYNOPSIS")
    page.synopsis([f"{PROGRAM} [OPTION]... COMMAND [ARGUMENT]..."])
    page.section("DESCRIPTION")
    page.paragraph(DESCRIPTION)
    page.section("COMMANDS")
    for command in shown_commands():
        page.subsection(usage(command))
        page.paragraph(sentence(command))
        for argument in command.arguments:
            page.item(argument.name, _as_sentence(argument.doc))
        _options(page, command.options)
    page.section("OPTIONS")
    page.paragraph("These may stand before or after the command.")
    _options(page, GLOBAL_OPTIONS)
    page.section("SOCKET")
    page.paragraph(SOCKET_ORDER)
    _output(page)
    page.section("EXIT STATUS")
    page.item("0", "The answer is complete.")
    for code in CODES:
        page.item(str(code.exit_status), _as_sentence(f"{code.name}: {code.meaning}"))
    page.paragraph(
        "When it is interrupted, or its reader has gone, it dies of that signal, which a shell shows as 130 or 141."
    )
    page.section("ENVIRONMENT")
    page.item("`HEGM_SOCKET`", "The daemon's socket, where `--socket` is not given.")
    page.item(
        "`XDG_RUNTIME_DIR`",
        "The directory below which a user's own daemon listens, at `hegm/hegmd.sock`; `/run/user/UID` if not set. "
        "Where that does not exist, `hegmctl run` starts a daemon at `/tmp/hegm-UID/hegmd.sock`.",
    )
    page.item(
        "`HEGM_SOCKET`, `HEGM_RUN`, `HEGM_JOB`, `HEGM_GPU`, `HEGM_IMAGES`, `HEGM_MSGPACK`, `PYTHONPATH`",
        "What `hegmctl run` sets for its command, so that the agent is loaded, finds the daemon, and says whose it is.",
    )
    page.item("`NO_COLOR`, `TERM`, `COLUMNS`", "Whether to use colours, and how wide the terminal is.")
    page.section("EXAMPLES")
    for command in shown_commands():
        for example, meaning in command.examples:
            page.paragraph(_as_sentence(meaning))
            page.example([example])
    page.section("SEE ALSO")
    page.paragraph("`hegmd`(8), `hegmd.toml`(5)")
    return page.text()


def _output(page: Page) -> None:
    page.section("OUTPUT")
    page.paragraph(
        "Standard output carries the answer and nothing else; notes and errors go to standard error. In a pipe a table "
        "keeps all its columns, and an error is one line: the reason and, after a semicolon, the next step."
    )
    page.paragraph(
        "With `--json` an answer is one document, and each element of a stream (`events`, `ps --watch`, and how an "
        "operation comes on) is one document on a line of its own. All have the member `schema`. An error is a "
        "document with the member `error`, on standard error. Sizes are in bytes, times in seconds, and what is not "
        "known is null."
    )


def _options(page: Page, options: tuple[Option, ...]) -> None:
    for option in options:
        page.item(f"`{option_forms(option)}`", _as_sentence(option.doc))


def _as_sentence(text: str) -> str:
    first = text.split()[0]
    if first.isalpha() and first.islower():  # not a name, nor the first of a list of values
        text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def daemon_page(day: str) -> str:
    """hegmd(8)."""
    page = Page("hegmd", 8, day, _SOURCE, "System Administration")
    page.name("hegmd", daemon_arguments.SUMMARY)
    page.section("SYNOPSIS")
    page.synopsis(["hegmd [OPTION]..."])
    page.section("DESCRIPTION")
    page.paragraph(
        "hegmd watches the GPUs of a node and the processes on them, and answers `hegmctl`(1) and other programs at a "
        "Unix socket. It is started by systemd, as `hegmd.service` or by the first to use `hegmd.socket`; by any user "
        "for their own processes, as `hegmd --user`; or, on a machine without a GPU, with simulated ones, as `hegmd "
        "--simulate 2x8GiB --socket PATH --state-dir DIR`."
    )
    page.section("OPTIONS")
    for argument in daemon_arguments.ARGUMENTS:
        form = argument.flag if argument.metavar is None else f"{argument.flag} {argument.metavar}"
        page.item(f"`{form}`", _as_sentence(argument.help))
    page.item("`-h`, `--help`", "Print the options.")
    page.item("`--version`", "Print the version.")
    page.section("SIGNALS")
    page.item("SIGTERM, SIGINT", "End in order: callers are told, and nothing that a job needs is lost.")
    page.item(
        "SIGHUP", "Read the configuration again. A bad one is refused as a whole, and the previous one stays in effect."
    )
    page.section("FILES")
    page.item("`/etc/hegm/hegmd.toml`", "The configuration; see `hegmd.toml`(5).")
    page.item("`/run/hegm/hegmd.sock`", "The socket; with `--user` `$XDG_RUNTIME_DIR/hegm/hegmd.sock`.")
    page.item("`/var/lib/hegm`", "What has to survive a restart.")
    page.section("ENVIRONMENT")
    page.item("`HEGM_CONFIG`", "The configuration file, as `--config` names it.")
    for variable, keys in _variables().items():
        page.item(f"`{variable}`", f"The same as {' and '.join(keys)} in the configuration, and before it.")
    page.section("EXIT STATUS")
    page.paragraph("0 after an orderly end; otherwise as in `hegmctl`(1).")
    page.section("SEE ALSO")
    page.paragraph("`hegmctl`(1), `hegmd.toml`(5), `systemd.socket`(5)")
    return page.text()


def _variables() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in ROWS.values():
        if row.variable is not None:
            found.setdefault(row.variable, []).append(f"`{row.key}`")
    return found


def configuration_page(day: str) -> str:
    """hegmd.toml(5)."""
    page = Page("hegmd.toml", 5, day, _SOURCE, "File Formats")
    page.name("hegmd.toml", "the configuration of hegmd")
    page.section("DESCRIPTION")
    page.paragraph(
        "A TOML file with the sections below; each setting can be left out, and then has the default shown. The file "
        "is `/etc/hegm/hegmd.toml`, or with `hegmd --user` `$XDG_CONFIG_HOME/hegm/hegmd.toml`, or what `--config` "
        "names. An unknown key or a bad value is an error; `hegmd --check-config` tells all of them at once, with "
        "their lines, and `hegmctl config` shows the active settings and where it comes from."
    )
    for section, cls in SECTIONS.items():
        page.section(f"[{section}]")
        page.paragraph((cls.__doc__ or section).strip())
        for row in ROWS.values():
            if row.key.startswith(f"{section}."):
                page.item(
                    f"`{row.key.removeprefix(f'{section}.')} = {toml_of(row.default)}`",
                    _as_sentence(row.doc),
                    _facts(row),
                )
    page.section("SEE ALSO")
    page.paragraph("`hegmd`(8), `hegmctl`(1)")
    return page.text()


def _facts(row: Row) -> str:
    facts = [_as_sentence(row.kind.form)]
    if row.user_default != row.default:
        facts.append(f"With `--user`: `{toml_of(row.user_default)}`.")
    names = [f"`{name}`" for name in (row.variable, row.flag) if name]
    if names:
        facts.append(f"Also {' and '.join(names)}.")
    facts.append("Taken over by a reload." if row.reloads else "Takes a restart.")
    return " ".join(facts)

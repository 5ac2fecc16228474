"""The manual pages of HeGM's outside: hegm-launcher(1) and hegm-ctrl(1)."""

from __future__ import annotations

from hegmcompat import control, ctrl_cli, launcher_cli
from hegmcompat.surroundings import VARIABLES
from hegmd import __version__
from tools.docs.hegmctl.roff import Page

_SOURCE = f"hegm {__version__}"
_FOR_LAUNCHER = ("HEGM_CHECKPOINT_DIR", "HEGM_CHECKPOINT_PATH", "HEGM_EXIT_CODE", "HEGM_POLL_INTERVAL")
_FOR_REST = ("HEGM_CTRL_HOST", "HEGM_CTRL_PORT", "HEGM_CTRL_TOKEN", "HEGM_LOG_LEVEL")
_FOR_CTRL = ("HEGM_CHECKPOINT_DIR", "HEGM_CHECKPOINT_PATH", "HEGM_CTRL_CHECKPOINT_TIMEOUT", "HEGM_POLL_INTERVAL")
# Each word that a caller may read, and what it means.
RESULTS = {
    control.READY: "The state is in its file, and the launcher waits behind its lock.",
    f"{control.SIGNALLED} ({control.LATE})": "The signal was sent, and no lock came within the limit.",
    f"{control.SIGNALLED} ({control.EXITED})": "The signal was sent, and the launcher has ended without a lock.",
    control.NO_GPU: "With --all: the worker has no GPU open.",
    control.NO_PROCESS: "There is no such process.",
    control.DENIED: "It is another user's.",
    "error: REASON": "It was not signalled, or its worker has refused and trains on, for that reason.",
    control.LOCK_REMOVED: "The launcher goes on.",
    control.NO_LOCK: "That launcher does not wait.",
}


def launcher_page(day: str) -> str:
    """hegm-launcher(1)."""
    page = Page("hegm-launcher", 1, day, _SOURCE, "User Commands")
    page.name("hegm-launcher", launcher_cli.SUMMARY)
    page.section("SYNOPSIS")
    page.synopsis(["hegm-launcher [--debug] COMMAND [ARGUMENT]..."])
    page.section("DESCRIPTION")
    page.paragraph(
        "Runs the command with hegmd's agent in every Python of it, as HeGM's launcher did, and stays as its "
        "parent. When its training is asked for its state, by `hegm-ctrl`(1) or by SIGUSR1 to the worker, it leaves "
        "at its next batch boundary. The state is then in `latest.pt`, `lock` is beside it, and the launcher waits "
        "until somebody takes that lock away; then the command is started again, and goes on where it was. No daemon "
        "is needed."
    )
    page.paragraph(
        "Signals are passed on, and the launcher ends as the command does. A script that is named by itself, "
        "`train.py`, is run by Python. A worker that has its own handler for SIGUSR1 keeps it, and cannot be asked."
    )
    page.section("OPTIONS")
    page.item("`--debug`", "Say each step, on standard output.")
    page.section("FILES")
    page.item(
        "`/checkpoint/PID/latest.pt`",
        "The state, of the launcher with that pid. No file of torch.save: it holds plain values.",
    )
    page.item("`/checkpoint/PID/lock`", "There while the launcher waits.")
    page.item("`/checkpoint/PID/command`", "Of which command the state is. Another one does not go on from it.")
    page.item("`/checkpoint/PID/refused`", "Why the last request was refused.")
    page.item("`/checkpoint/.workers/PID`", "The pid of that launcher's worker.")
    _variables(page, _FOR_LAUNCHER + _FOR_REST)
    page.section("EXIT STATUS")
    page.paragraph(
        "That of the command; by the same signal, where one ended it. 98: a state could not be put back, and is "
        "where it was. 127 and 126: no such command, and one that cannot be run. 2: a setting is wrong. 6: what lies "
        "in the place of the state is none."
    )
    page.section("SEE ALSO")
    page.paragraph("`hegm-ctrl`(1), `hegmctl`(1)")
    return page.text()


def ctrl_page(day: str) -> str:
    """hegm-ctrl(1)."""
    page = Page("hegm-ctrl", 1, day, _SOURCE, "User Commands")
    page.name("hegm-ctrl", ctrl_cli.SUMMARY)
    page.section("SYNOPSIS")
    page.synopsis([f"hegm-ctrl {command.name} [OPTION]..." for command in ctrl_cli.COMMANDS])
    page.section("DESCRIPTION")
    page.paragraph(
        "Asks workers under `hegm-launcher`(1) for their state and waits until it is there; lets launchers go "
        "on; and offers both over HTTP. It has the commands, words and exit statuses of HeGM's."
    )
    page.section("COMMANDS")
    for command in ctrl_cli.COMMANDS:
        page.subsection(f"hegm-ctrl {command.name}")
        page.paragraph(command.doc)
        for option in command.options:
            page.item(f"`{', '.join(option.flags)}{' ' + option.metavar if option.metavar else ''}`", option.doc)
    page.section("RESULTS")
    for word, meaning in RESULTS.items():
        page.item(f"`{word}`", meaning)
    page.section("REST")
    page.paragraph(
        '`POST /checkpoint` takes `{"pids": [PID, ...]}` or `{"all": true}`, `POST /resume` `{"ppids": [PID, ...]}` or '
        '`{"all": true}`; both answer `{"results": {"PID": "RESULT"}}`. Every launcher offers them while it runs, and '
        "`hegm-ctrl api-server` does by itself."
    )
    _variables(page, _FOR_CTRL + _FOR_REST)
    page.section("EXIT STATUS")
    page.paragraph(
        "0 whatever the results are, 1 if `checkpoint --all` finds nobody or `api-server` cannot listen, 2 for "
        "a wrong command line or setting."
    )
    page.section("SEE ALSO")
    page.paragraph("`hegm-launcher`(1), `hegmctl`(1)")
    return page.text()


def _variables(page: Page, names: tuple[str, ...]) -> None:
    page.section("ENVIRONMENT")
    for name in names:
        page.item(f"`{name}`", VARIABLES[name])

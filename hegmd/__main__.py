"""hegmd's entry point: arguments, configuration, log, then the app. Only this module decides the exit status.

The command line is a table, ARGUMENTS, from which the parser and the manual page are made.

Half a start is imports. The vendors' libraries are opened in threads meanwhile, the garbage collector is disabled until
the daemon serves, and the process ends without finalising the interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from hegmd import __version__
from hegmd.errors import USAGE, HegmError

if TYPE_CHECKING:
    from hegmd.config import Config
    from hegmd.node.devices.node_spec import Topology
    from hegmd.protocol.snapshots import Check

SUMMARY = "node daemon that manages a machine's GPUs and the jobs on them"


class Argument(NamedTuple):
    """An option. Without a metavar it is a switch."""

    flag: str
    metavar: str | None
    help: str


ARGUMENTS: tuple[Argument, ...] = (
    Argument("--config", "FILE", "read this configuration instead of /etc/hegm/hegmd.toml (HEGM_CONFIG)"),
    Argument("--socket", "PATH", "listen here instead of /run/hegm/hegmd.sock (HEGM_SOCKET)"),
    Argument("--state-dir", "DIR", "keep state here instead of /var/lib/hegm (HEGM_STATE_DIR)"),
    Argument("--user", None, "be a private daemon: own processes only, paths in the user's own directories"),
    Argument("--simulate", "SPEC", "simulate GPUs: 2x8GiB for two of that size, or a TOML file with a topology"),
    Argument("--until", "PID", "exit after that process has ended, once no job, client or operation remains"),
    Argument("--check-config", None, "read the configuration, report every mistake in it, and exit"),
    Argument("--doctor", None, "check this node without a daemon, one JSON object a line, and exit"),
    Argument("--log-level", "LEVEL", "debug, info, warning or error"),
    Argument("--log-format", "FORMAT", "auto, journal, json or text"),
)

# The options that are settings; the others select what this run does.
_SETTINGS = {
    "socket": "daemon.socket",
    "state_dir": "daemon.state_dir",
    "log_level": "log.level",
    "log_format": "log.format",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser for the table."""
    made = argparse.ArgumentParser(prog="hegmd", description=f"{SUMMARY}.", allow_abbrev=False)
    for argument in ARGUMENTS:
        if argument.metavar is None:
            made.add_argument(argument.flag, action="store_true", help=argument.help)
        else:
            made.add_argument(argument.flag, metavar=argument.metavar, help=argument.help)
    made.add_argument("--version", action="version", version=f"hegmd {__version__}")
    return made


def main() -> NoReturn:
    """Run hegmd for this process's arguments, and end the process."""
    status = run(sys.argv[1:])
    # All is closed and written, and a call for which a thread waits may never return.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def run(argv: Sequence[str]) -> int:
    _fill_closed_descriptors()
    arguments = parser().parse_args(argv)
    try:
        return _run(arguments)
    except HegmError as error:
        for line in (*error.message.splitlines(), error.hint):
            print(f"hegmd: {line}", file=sys.stderr)
        return error.code.exit_status
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _fill_closed_descriptors() -> None:
    """Put the null device where stdin, stdout or stderr is closed, as after `2>&-`.

    The first file or socket that is opened would get the number, and then the log, or a traceback, would go into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one


def _run(arguments: argparse.Namespace) -> int:
    gc.disable()  # imported objects stay, and the collector would traverse them dozens of times; `app` enables it
    import faulthandler
    from functools import partial

    import anyio

    from hegmd.config import load
    from hegmd.node.inventory.vendors import VendorWatch, providers_for
    from hegmd.system.systemd import take_offer
    from hegmd.telemetry import log

    given = {key: getattr(arguments, name) for name, key in _SETTINGS.items()}
    settings = {key: value for key, value in given.items() if value is not None}
    load_again = partial(load, path=arguments.config, user_mode=arguments.user, arguments=settings)
    config = load_again()
    topology = None if arguments.simulate is None else _simulated(arguments.simulate)
    if arguments.check_config:
        print(f"{config.path or 'no configuration file, so the defaults'}: ok")
        return 0
    if arguments.doctor:
        anyio.run(_examine, config, topology, arguments.user)
        return 0
    # A loop that hangs gets SIGABRT from systemd's watchdog: then the journal shows where every thread was.
    faulthandler.enable(log.STDERR)
    offer = take_offer(os.environ, os.getpid())
    with log.set_up(config.log.level, config.log.format) as log_setup:
        until = None if arguments.until is None else _pid(arguments.until)
        vendors = [VendorWatch(provider) for provider in providers_for(config.inventory.is_off, topology)]
        for vendor in vendors:
            vendor.begin()
        from hegmd.app import App  # the most part of all imports

        app = App(config, load_again, log_setup, offer, topology, vendors, user_mode=arguments.user, until_pid=until)
        anyio.run(app.run)
    return 0


def _simulated(spec: str) -> Topology:
    from hegmd.node.devices.topology import parse_topology

    return parse_topology(spec)


def _pid(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise HegmError(USAGE, f"--until {text}: a process id is needed", "write it in digits, such as 4711")
    return int(text)


async def _examine(config: Config, topology: Topology | None, user_mode: bool) -> None:
    """Make the doctor's checks without a daemon and print each as a line of JSON."""
    import json

    from hegmd.node.doctor.run import run_checks
    from hegmd.wiring import look_once, node_facts

    async def show(check: Check) -> None:
        print(json.dumps(check.to_plain()), flush=True)

    snapshot = await look_once(config, topology)
    simulated = topology is not None
    facts = node_facts(config, snapshot, simulated=simulated, user_mode=user_mode, under_systemd=False)
    await run_checks(facts, show)


if __name__ == "__main__":
    main()

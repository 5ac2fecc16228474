"""The doctor without a daemon, with programs in hegmd's place."""

from __future__ import annotations

import json
import os
import sys

import pytest

from hegmctl.node_checks import check_here, doctor_command
from hegmd.errors import EXTERNAL, ExternalError, HegmError
from hegmd.protocol.snapshots import Check
from tests.unit.hegmctl import node


def _program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def _saying(*checks: Check) -> str:
    return "".join(f"print({json.dumps(json.dumps(check.to_plain()))}, flush=True)\n" for check in checks)


def test_the_program_is_that_of_this_installation() -> None:
    assert doctor_command()[0] == sys.executable
    assert doctor_command()[-3:] == ["-m", "hegmd", "--doctor"]


def test_each_check_is_sent_as_soon_as_it_ends() -> None:
    """The program waits, after its first check, for a file that is only made when that one was seen."""
    read_end, write_end = os.pipe()
    observed: list[Check] = []

    def on_check(check: Check) -> None:
        observed.append(check)
        os.write(write_end, b"x")

    os.set_inheritable(read_end, True)
    program = _saying(node.CHECKS[0]) + f"import os; os.read({read_end}, 1)\n" + _saying(node.CHECKS[1])
    check_here(on_check, _program(program))
    os.close(read_end)
    os.close(write_end)
    assert tuple(observed) == node.CHECKS[:2]


def test_a_program_that_fails_before_its_first_check_is_reported_with_the_reason() -> None:
    with pytest.raises(ExternalError, match="the checks could not be made: it is broken") as raised:
        check_here(lambda _check: None, _program("import sys; sys.exit('x' * 100000 + '\\nit is broken')"))
    assert raised.value.status == 1
    assert len(raised.value.output_tail) <= 2000
    with pytest.raises(ExternalError, match="hegmd ended with status 7"):
        check_here(lambda _check: None, _program("raise SystemExit(7)"))


def test_a_missing_program_is_reported() -> None:
    with pytest.raises(HegmError, match="/no/such/program cannot be run") as raised:
        check_here(lambda _check: None, ["/no/such/program"])
    assert raised.value.code is EXTERNAL


@pytest.mark.parametrize("line", ["nonsense", "{}", "[]", '{"id": 1, "status": "ok", "summary": "x"}'])
def test_a_line_that_is_not_a_check_ends_the_program(line: str) -> None:
    program = f"import time\nprint({line!r}, flush=True)\ntime.sleep(60)"
    with pytest.raises(ExternalError, match="printed an invalid check"):
        check_here(lambda _check: None, _program(program))


def test_a_caller_that_gives_up_takes_the_program_along() -> None:
    def on_check(_check: Check) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_here(on_check, _program(_saying(node.CHECKS[0]) + "import time; time.sleep(60)"))
    # The fixture that looks for children left behind is the judge.

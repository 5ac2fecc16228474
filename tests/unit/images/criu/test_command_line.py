"""CRIU's command lines: the options that are always there, and those for special cases."""

from __future__ import annotations

import os

from hegmd.images.criu.command_line import dump_order, opened, place_of, restore_order, unit_name_for
from hegmd.images.criu.needs import Needs, Outlet

PIPE = Outlet("pipe:[9]", ((4, 1),), is_read=False, is_written=True)
INPUT = Outlet("pipe:[7]", ((4, 0),), is_read=True, is_written=False)
TERMINAL = Outlet("tty[8803:18]", ((4, 2),), is_read=True, is_written=True)
NEEDS = Needs((4,), dump_options=("--file-locks",), restore_options=("--tcp-close",), outlets=(PIPE, INPUT, TERMINAL))


def test_control_groups_and_the_nodes_own_configuration_are_left_out() -> None:
    for order in (dump_order("criu", 4, NEEDS, leave_stopped=True), restore_order("criu", NEEDS)):
        assert "--unprivileged" not in order
        assert {"--manage-cgroups=ignore", "--no-default-config"} <= set(order)


def test_a_dump_never_ends_the_job() -> None:
    assert "--leave-stopped" in dump_order("criu", 4, NEEDS, leave_stopped=True)
    assert "--leave-running" in dump_order("criu", 4, NEEDS, leave_stopped=False)


def test_each_has_the_options_that_are_its_own() -> None:
    assert "--file-locks" in dump_order("criu", 4, NEEDS, leave_stopped=True)
    order = restore_order("criu", NEEDS)
    assert "--file-locks" not in order
    assert order[order.index("--tcp-close") + 1 : order.index("--log-file")] == [
        *("--inherit-fd", "fd[10]:pipe:[9]"),
        *("--inherit-fd", "fd[11]:pipe:[7]"),
        *("--inherit-fd", "fd[12]:tty[8803:18]"),
    ]


def test_output_redirections_are_opened_by_kind_under_the_numbers_in_the_order() -> None:
    assert opened(NEEDS, {}) == [
        *("--open", "10:a:/dev/null"),
        *("--open", "11:r:/dev/null"),
        *("--open", "12:t:/dev/null"),
    ]


def test_with_a_users_rights_criu_accepts_its_limits() -> None:
    orders = (
        dump_order("criu", 4, NEEDS, leave_stopped=True, as_user=True),
        restore_order("criu", NEEDS, as_user=True),
    )
    assert all("--unprivileged" in order for order in orders)


def test_redirected_output_is_appended() -> None:
    """CRIU opens the output again, without O_APPEND."""
    log = Outlet("socket:[5]", ((4, 3),), is_read=True, is_written=True)
    needs = Needs((4,), outlets=(PIPE, log, TERMINAL))
    assert opened(needs, dict.fromkeys(("pipe:[9]", "socket:[5]", "tty[8803:18]"), "/proc/1/fd/5")) == [
        *("--open", "10:p:/proc/1/fd/5"),
        *("--open", "11:s:/proc/1/fd/5"),
        *("--open", "12:t:/proc/1/fd/5"),
    ]


def test_a_directory_is_named_by_the_descriptor_that_was_checked() -> None:
    assert place_of(5, 77) == "/proc/77/fd/5"
    assert place_of(5) == f"/proc/{os.getpid()}/fd/5"


def test_a_unit_has_a_name_that_operators_recognise() -> None:
    assert unit_name_for(["4711", "my train.py"]) == "hegm-job-4711-my_train.py.service"
    assert unit_name_for(["../../x", "", "ä" * 99]) == "hegm-job-x.service"
    assert unit_name_for([]) == "hegm-job-restored.service"

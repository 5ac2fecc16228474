"""Permissions as a table: by uid and groups alone."""

import pytest

from hegmd.errors import DENIED, HegmError
from hegmd.protocol.messages import (
    REQUESTS,
    BeginProof,
    Cancel,
    EndProof,
    Gpus,
    Hello,
    Ping,
    Processes,
    Reload,
    Request,
    SimulateFault,
)
from hegmd.protocol.operations import Operation, OperationProgress, Reason, StoryLine, Wait
from hegmd.protocol.snapshots import Event, GpuProcess
from hegmd.server.auth import Peer, Policy
from tests.cells import in_one_test

ADMIN_GID = 990
ROOT = Peer(pid=1, uid=0, gid=0)
OWNER = Peer(pid=2, uid=500, gid=500)
BY_PRIMARY_GROUP = Peer(pid=3, uid=1000, gid=ADMIN_GID)
BY_SUPPLEMENTARY_GROUP = Peer(pid=4, uid=1001, gid=1001, groups=frozenset((27, ADMIN_GID)))
ANYBODY = Peer(pid=5, uid=1002, gid=1002, groups=frozenset((27,)))

SYSTEM = Policy(daemon_uid=500, admin_gid=ADMIN_GID)
PRIVATE = Policy(daemon_uid=500, own_user_only=True)


@pytest.mark.parametrize("peer", [ROOT, OWNER, BY_PRIMARY_GROUP, BY_SUPPLEMENTARY_GROUP])
def test_root_the_daemons_user_and_the_group_may_act_on_all(peer: Peer) -> None:
    assert SYSTEM.may_act_on_all(peer)
    assert SYSTEM.may_act_on(peer, ANYBODY.uid)
    assert SYSTEM.may_act_on(peer, None)
    for request in REQUESTS.values():
        SYSTEM.check(peer, request)


def test_other_users_may_act_on_their_own_processes_and_not_on_those_of_an_unknown_owner() -> None:
    assert not SYSTEM.may_act_on_all(ANYBODY)
    assert SYSTEM.may_act_on(ANYBODY, ANYBODY.uid)
    assert not SYSTEM.may_act_on(ANYBODY, 0)
    assert not SYSTEM.may_act_on(ANYBODY, None)


@pytest.mark.parametrize("request_class", [BeginProof, EndProof, Reload, SimulateFault])
def test_changes_to_the_node_are_refused_to_other_users(request_class: type[Request]) -> None:
    with pytest.raises(HegmError, match="uid 1002") as caught:
        SYSTEM.check(ANYBODY, request_class)
    assert caught.value.code is DENIED


@in_one_test("request_class", [Hello, Cancel, Ping, Gpus, Processes])
def test_looking_is_free(request_class: type[Request]) -> None:
    SYSTEM.check(ANYBODY, request_class)


def test_without_the_group_on_the_node_membership_means_nothing() -> None:
    policy = Policy(daemon_uid=0, admin_gid=None)
    assert not policy.may_act_on_all(BY_PRIMARY_GROUP)


def test_a_private_daemon_serves_its_user_and_root() -> None:
    assert PRIVATE.may_connect(OWNER)
    assert PRIVATE.may_connect(ROOT)
    assert not PRIVATE.may_connect(ANYBODY)
    assert SYSTEM.may_connect(ANYBODY)


def test_command_lines_of_other_users_are_kept_back() -> None:
    process = GpuProcess(pid=9, uid=0, command="train --token s3cret", gpus=())
    visible = SYSTEM.visible(ANYBODY, process)
    assert visible.command is None
    assert "another user" in (visible.note or "")
    assert SYSTEM.visible(BY_PRIMARY_GROUP, process) == process
    own = process.replace(uid=ANYBODY.uid)
    assert SYSTEM.visible(ANYBODY, own) == own


def test_other_unknown_facts_are_explained_although_the_command_line_is_hidden() -> None:
    """The note about the command line replaced any other note."""
    process = GpuProcess(pid=9, uid=0, command="train", gpus=(), note="known by its start time only")
    note = SYSTEM.visible(ANYBODY, process).note
    assert note == "known by its start time only; command line hidden: another user's process"


def test_the_text_of_an_error_in_a_job_is_hidden_from_other_users() -> None:
    """`hegmctl events` showed everyone the exception that a rank of another user had raised."""
    owner = ANYBODY.uid
    facts = {"job": "j1", "uid": owner, "path": "/home/own"}
    event = Event(seq=1, time_utc=1.0, kind="job.fell", severity="warning", message="KeyError: 'secret'", facts=facts)
    hidden = SYSTEM.visible_event(Peer(pid=6, uid=1003, gid=1003), event)
    assert "secret" not in hidden.message
    assert dict(hidden.facts) == {"job": "j1", "uid": owner}
    assert SYSTEM.visible_event(ANYBODY, event) == SYSTEM.visible_event(BY_PRIMARY_GROUP, event) == event


def test_the_failure_of_an_operation_on_a_job_was_shown_to_other_users() -> None:
    """`hegmctl events` hid it, and `hegmctl ops` and `hegmctl op` did not: paths of images, and lines of the script."""
    wait = Wait(why="/home/own/secret is full", next="rm /home/own/secret")
    operation = Operation(
        id="1",
        kind="migrate",
        phase="rolled-back",
        processes=(),
        owner_uid=ANYBODY.uid,
        created_utc=1.0,
        size_bytes=0,
        failure=Reason(code="refused", message="secret at train.py:7", hint="hegm.keep('secret')"),
        waits=wait,
        note="/home/own/secret",
    )
    story = [StoryLine(utc=1.0, event="failed", detail="message secret", phase="rolled-back")]
    progress = OperationProgress(id="1", phase="reserving", waits=wait)

    def seen(peer: Peer) -> tuple[object, ...]:
        uid = operation.owner_uid
        visible = SYSTEM.visible_operation(peer, operation), SYSTEM.visible_story(peer, uid, story)
        return (*visible, SYSTEM.visible_progress(peer, uid, progress))

    assert seen(ANYBODY) == seen(BY_PRIMARY_GROUP) == (operation, tuple(story), progress)
    assert "secret" not in repr(seen(Peer(pid=6, uid=1003, gid=1003)))

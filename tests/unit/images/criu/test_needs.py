"""The features of CRIU that a tree needs, and the objections to a dump, from written trees."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from hegmd.images.criu.needs import Needs, needs_of
from hegmd.node.processes.process_tree import Descriptor, Mapping, Tree, TreeProcess
from hegmd.node.processes.socket_peers import TcpEnd, UnixEnd
from tests.cells import in_one_test

HERE = (("mnt", "mnt:[1]"), ("net", "net:[1]"), ("pid", "pid:[1]"))
ROOT = TreeProcess(pid=100, parent=1, start_ticks=5, state="S", group=100, session=100, namespaces=HERE)
CHILD = TreeProcess(pid=101, parent=100, start_ticks=6, state="S", group=100, session=100, namespaces=HERE)
FIFO, SOCKET, CHARACTER = stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR


def tree(*descriptors: Descriptor, mappings: tuple[Mapping, ...] = (), **more: object) -> Tree:
    values: dict[str, object] = {"members": (ROOT, CHILD), "namespaces": HERE, **more}
    return Tree(root=100, descriptors=descriptors, mappings=mappings, **values)  # type: ignore[arg-type] # as given


def socket_of(pid: int, fd: int, inode: int) -> Descriptor:
    return Descriptor(pid, fd, f"socket:[{inode}]", mode=SOCKET, flags=os.O_RDWR, inode=inode)


def messages(needs: Needs) -> list[str]:
    return [reason.message for reason in needs.reasons]


def test_a_plain_tree_needs_nothing() -> None:
    needs = needs_of(tree(Descriptor(100, 3, "/data/set.bin", size_bytes=7)))
    assert (needs.pids, needs.dump_options, needs.restore_options, needs.outlets, needs.reasons) == (
        *((100, 101), (), ()),
        *((), ()),
    )
    assert [(file.path, file.size_bytes, file.is_written) for file in needs.files] == [("/data/set.bin", 7, False)]


def test_the_plain_form_has_all_that_a_restore_needs() -> None:
    needs = needs_of(
        tree(
            Descriptor(100, 1, "pipe:[9]", mode=FIFO, flags=os.O_WRONLY),
            Descriptor(100, 3, "/out", flags=os.O_WRONLY | os.O_APPEND, size_bytes=3, is_locked=True),
        )
    )
    assert Needs.from_plain(needs.plain()) == needs
    assert needs.outlets
    assert needs.files[0].is_appended


def test_a_shell_job_is_passed_to_criu_as_one() -> None:
    assert needs_of(tree(members=(ROOT._replace(session=50),))).dump_options == ("--shell-job",)
    assert needs_of(tree(members=(ROOT._replace(group=50),))).restore_options == ("--shell-job",)


def test_a_child_in_a_strange_session_is_refused() -> None:
    found = needs_of(tree(members=(ROOT, CHILD._replace(session=77))))
    assert messages(found) == ["process 101 is in session 77, whose leader is neither in the job nor its own"]


def test_a_job_that_was_started_from_outside_of_its_container_was_stopped_before_criu_refused_it() -> None:
    """CRIU said «A session leader of 100 is outside of its pid namespace»: so it is with kubectl exec."""
    found = needs_of(tree(members=(ROOT._replace(session=0), CHILD._replace(session=0))))
    assert [message.partition(" whose")[0] for message in messages(found)] == [
        "process 100 is in a session",
        "process 101 is in a session",
    ]


def test_a_file_on_a_dead_disk_was_an_internal_error_and_is_named() -> None:
    found = needs_of(tree(Descriptor(100, 3, "/mnt/gone/x", trouble="Stale file handle")))
    assert messages(found) == [
        "process 100 has /mnt/gone/x open (descriptor 3), which cannot be inspected: Stale file handle"
    ]


def test_a_pidfd_of_a_process_outside_the_job_is_refused_before_the_job_parks() -> None:
    own, ended = (Descriptor(100, fd, "anon_inode:[pidfd]", refers_to=pid) for fd, pid in ((3, 101), (4, -1)))
    assert messages(needs_of(tree(own, ended, members=(ROOT, CHILD)))) == []
    assert messages(needs_of(tree(own._replace(refers_to=7), members=(ROOT, CHILD)))) == [
        "process 100 has a pidfd of process 7 open (descriptor 3), which is not in the job"
    ]


def test_steps_that_need_root_are_listed_separately() -> None:
    assert needs_of(tree()).only_by_root == ()
    found = needs_of(tree(members=(ROOT, CHILD._replace(is_confined=True))))
    assert found.reasons == ()
    assert [reason.message for reason in found.only_by_root] == [
        "process 101 has a filter of system calls (seccomp), which CRIU cannot dump with a user's rights"
    ]


def test_locks_and_deleted_files_become_options_only_if_present() -> None:
    locked = Descriptor(100, 3, "/out", is_locked=True)
    gone = Descriptor(100, 4, "/tmp/x (deleted)", links=0)
    elsewhere = Descriptor(100, 5, "/tmp/y (deleted)", links=1)
    memory = Descriptor(100, 6, "/memfd:pool (deleted)", links=0)
    assert needs_of(tree(locked)).dump_options == ("--file-locks",)
    assert needs_of(tree(gone)).dump_options[0] == "--ghost-limit"
    assert "--link-remap" in needs_of(tree(elsewhere)).restore_options
    assert needs_of(tree(memory)).dump_options == ()
    assert needs_of(tree(gone)).files == ()
    mapped = Mapping(100, "/dev/shm/torch_1", is_deleted=True)
    assert needs_of(tree(mappings=(mapped,))).dump_options[0] == "--ghost-limit"


def test_a_pipe_is_an_outlet_only_if_an_end_is_outside() -> None:
    written = Descriptor(100, 1, "pipe:[9]", mode=FIFO, flags=os.O_WRONLY)
    read = Descriptor(101, 0, "pipe:[9]", mode=FIFO, flags=os.O_RDONLY)
    (outlet,) = needs_of(tree(written)).outlets
    assert (outlet.key, outlet.fds, outlet.is_read, outlet.is_written) == ("pipe:[9]", ((100, 1),), False, True)
    assert needs_of(tree(written, read)).outlets == ()


def test_a_terminal_is_named_to_both_sides() -> None:
    terminal = Descriptor(
        100, 0, "/dev/pts/3", mode=CHARACTER, flags=os.O_RDWR, kind_device=os.makedev(136, 3), device=0x18
    )
    needs = needs_of(tree(terminal))
    assert needs.outlets[0].key == "tty[8803:18]"
    assert needs.dump_options == ("--external", "tty[8803:18]")
    master = Descriptor(101, 9, "/dev/ptmx", mode=CHARACTER, flags=os.O_RDWR, kind_device=os.makedev(5, 2))
    assert needs_of(tree(terminal, master)).outlets == ()


def test_a_job_with_its_own_controlling_terminal_is_refused() -> None:
    found = needs_of(tree(members=(ROOT._replace(has_terminal=True),)))
    assert "controlling terminal" in messages(found)[0]
    assert needs_of(tree(members=(ROOT._replace(has_terminal=True, session=50),))).reasons == ()


@in_one_test(
    ("target", "refused"),
    [
        ("anon_inode:[eventfd]", False),
        ("anon_inode:[eventpoll]", False),
        ("anon_inode:inotify", False),
        ("anon_inode:[io_uring]", True),
        ("anon_inode:[perf_event]", True),
        ("anon_inode:bpf-map", True),
    ],
)
def test_deleted_files_are_dumped_or_refused(target: str, refused: bool) -> None:
    found = needs_of(tree(Descriptor(100, 7, target, mode=0)))
    assert bool(found.reasons) == refused
    if refused:
        assert messages(found)[0].startswith(f"process 100 has {target.removeprefix('anon_inode:').strip('[]')} open")


def test_devices_that_criu_knows_and_others() -> None:
    null = Descriptor(100, 0, "/dev/null", mode=CHARACTER, kind_device=os.makedev(1, 3))
    fuse = Descriptor(100, 5, "/dev/fuse", mode=CHARACTER, kind_device=os.makedev(10, 229))
    assert needs_of(tree(null)).reasons == ()
    assert messages(needs_of(tree(fuse))) == [
        "process 100 has /dev/fuse open (descriptor 5), a device that CRIU cannot dump"
    ]


def test_open_gpu_devices_are_refused_except_in_processes_that_the_driver_checkpoints() -> None:
    held = Descriptor(101, 8, "/dev/nvidia0", mode=CHARACTER, kind_device=os.makedev(195, 0))
    mapped = Mapping(101, "/dev/nvidiactl")
    found = needs_of(tree(held, mappings=(mapped, Mapping(101, "/dev/nvidia0"))))
    assert messages(found) == [
        "process 101 has /dev/nvidia0 open (descriptor 8), which CRIU cannot dump",
        "process 101 has /dev/nvidiactl mapped, which CRIU cannot dump",
    ]
    assert "hegmctl run" in found.reasons[0].hint
    assert needs_of(tree(held, mappings=(mapped,)), gpu_pids={101}).reasons == ()


def test_shared_memory_of_the_node_is_refused() -> None:
    found = needs_of(tree(mappings=(Mapping(100, "/SYSV0000beef", is_deleted=True),)))
    assert "System V shared memory" in messages(found)[0]


def test_a_debugger_and_a_container_are_refused() -> None:
    traced = needs_of(tree(members=(ROOT._replace(tracer=42),)))
    assert messages(traced) == ["process 100 is traced by process 42"]
    own = (("mnt", "mnt:[2]"), ("net", "net:[1]"), ("pid", "pid:[2]"))
    sandboxed = needs_of(tree(namespaces=(*HERE, ("mnt", "mnt:[7]"))))
    assert sandboxed.reasons == (), "the daemon's own mount namespace is another one"
    contained = needs_of(tree(members=(ROOT._replace(namespaces=own),)))
    assert messages(contained) == ["process 100 has namespaces of its own: mnt, pid"]


# -- sockets -----------------------------------------------------------------------------------------------------------

STREAM, DATAGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM


def test_a_unix_socket_to_outside_is_refused_and_one_within_is_not() -> None:
    ends = {7: UnixEnd(STREAM, True, None, 8), 8: UnixEnd(STREAM, True, "/run/other.sock", 7)}
    found = needs_of(tree(socket_of(100, 5, 7), unix=ends))
    assert "connected to a process outside the job (descriptor 5, to /run/other.sock)" in messages(found)[0]
    assert needs_of(tree(socket_of(100, 5, 7), socket_of(101, 6, 8), unix=ends)).reasons == ()


def test_an_unaccepted_connection_counts_as_external() -> None:
    waiting = {7: UnixEnd(STREAM, True, None, None)}
    assert (
        "connected to a process outside the job (descriptor 5)"
        in messages(needs_of(tree(socket_of(100, 5, 7), unix=waiting)))[0]
    )
    unused = {7: UnixEnd(STREAM, False, None, None)}
    assert needs_of(tree(socket_of(100, 5, 7), unix=unused)).reasons == ()


def test_the_agents_own_socket_is_not_counted() -> None:
    ends = {7: UnixEnd(STREAM, True, None, 8), 8: UnixEnd(STREAM, True, "/run/hegmd.sock", 7)}
    assert needs_of(tree(socket_of(100, 5, 7), unix=ends), agent_sockets={"/run/hegmd.sock"}).reasons == ()


def test_a_datagram_socket_is_connected_again_by_its_peers_name() -> None:
    ends = {7: UnixEnd(DATAGRAM, True, None, 8), 8: UnixEnd(DATAGRAM, True, "/dev/log", None)}
    needs = needs_of(tree(socket_of(100, 5, 7), unix=ends))
    assert (needs.reasons, needs.dump_options) == ((), ("--ext-unix-sk",))
    nameless = {7: UnixEnd(DATAGRAM, True, None, 8), 8: UnixEnd(DATAGRAM, True, None, 7)}
    assert needs_of(tree(socket_of(100, 5, 7), unix=nameless)).reasons


@pytest.mark.parametrize("reader", ["/run/systemd/journal/stdout", None])
def test_output_to_the_journal_or_to_who_copies_that_of_a_restored_job_is_an_outlet(reader: str | None) -> None:
    ends = {7: UnixEnd(STREAM, True, None, 8), 8: UnixEnd(STREAM, True, reader, 7)}
    needs = needs_of(tree(socket_of(100, 1, 7), socket_of(101, 1, 7), unix=ends))
    assert needs.reasons == ()
    assert [(outlet.key, outlet.fds) for outlet in needs.outlets] == [("socket:[7]", ((100, 1), (101, 1)))]
    assert needs.dump_options == ("--external", "unix[7]")


def test_tcp_within_the_tree_is_kept_and_to_outside_refused_or_closed() -> None:
    ends = {7: TcpEnd("0100007F:1F90", "0100007F:C000"), 8: TcpEnd("0100007F:C000", "0100007F:1F90")}
    within = needs_of(tree(socket_of(100, 5, 7), socket_of(101, 6, 8), tcp=ends))
    assert (within.reasons, within.dump_options[0]) == ((), "--tcp-established")
    beyond = needs_of(tree(socket_of(100, 5, 7), tcp=ends))
    assert messages(beyond) == ["process 100 has a TCP connection to 127.0.0.1:49152 (descriptor 5)"]
    closed = needs_of(tree(socket_of(100, 5, 7), tcp=ends), close_connections=True)
    assert (closed.reasons, closed.restore_options) == ((), ("--tcp-close",))


def test_one_connection_seen_as_version_6_and_4_is_one() -> None:
    ends = {
        7: TcpEnd("0000000000000000FFFF00000100007F:1F90", "0000000000000000FFFF00000100007F:C000"),
        8: TcpEnd("0100007F:C000", "0100007F:1F90"),
    }
    assert needs_of(tree(socket_of(100, 5, 7), socket_of(101, 6, 8), tcp=ends)).reasons == ()
    (reason,) = needs_of(
        tree(socket_of(100, 5, 3), tcp={3: TcpEnd("0" * 32 + ":1", "B80D0120" + "0" * 16 + "01000000:50")})
    ).reasons
    assert "2001:0db8" in reason.message

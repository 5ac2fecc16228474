"""The processes that have loaded the CUDA driver's library, from /proc: what is reported, and which are left out."""

from __future__ import annotations

from hegmd.node.processes.cuda_users import CudaUser, find_cuda_users, read_cuda_user
from tests.unit.node.processes.pretended_proc import PretendedProc

LIBRARY = "7f0000-7f1000 r-xp 00000000 fe:00 5 /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04\n"
OTHER = "7e0000-7e1000 r-xp 00000000 fe:00 6 /usr/lib/x86_64-linux-gnu/libc.so.6\n"


def put(proc: PretendedProc, pid: int, maps: str, *targets: str, state: str = "S", start_ticks: int = 5000) -> None:
    proc.put(pid, state=state, start_ticks=start_ticks)
    folder = proc.root / str(pid)
    (folder / "maps").write_text(maps)
    (folder / "fd").mkdir()
    for number, target in enumerate(targets):
        (folder / "fd" / str(number)).symlink_to(target)
    with (folder / "status").open("a") as status:
        status.write("VmRSS:\t 999 kB\nRssAnon:\t 100 kB\nRssShmem:\t 20 kB\nVmSwap:\t 3 kB\nHugetlbPages:\t 4 kB\n")


def found(proc: PretendedProc) -> dict[int, CudaUser]:
    users: dict[int, CudaUser] = {}
    find_cuda_users(users, str(proc.root))
    return users


def test_those_with_the_library_are_found_with_all_memory_of_their_own(proc: PretendedProc) -> None:
    put(proc, 41, OTHER * 2000 + LIBRARY, "/dev/null", "/dev/nvidia0")
    put(proc, 42, LIBRARY, "/dev/null")
    put(proc, 43, OTHER, "/dev/nvidia0")
    put(proc, 44, LIBRARY, state="T")
    put(proc, 45, LIBRARY, state="Z")
    users = found(proc)
    assert sorted(users) == [41, 42, 44]
    assert [users[pid].has_devices for pid in (41, 42)] == [True, False]
    assert [users[pid].stopped for pid in (42, 44)] == [False, True]
    assert users[42].own_bytes == 127 << 10
    assert (users[42].who, users[42].uid, users[42].name) == ((42, 5000), 1000, "train")


def test_the_library_is_found_across_the_border_of_two_reads(proc: PretendedProc) -> None:
    for before in range(65536 - 120, 65536, 7):
        put(proc, before, "x" * before + LIBRARY)
    assert len(found(proc)) == len(range(65536 - 120, 65536, 7))


def test_unreadable_entries_are_left_out_and_hide_no_process(proc: PretendedProc) -> None:
    put(proc, 41, LIBRARY)
    put(proc, 42, LIBRARY)
    (proc.root / "41" / "maps").unlink()
    assert sorted(found(proc)) == [42]
    assert read_cuda_user(40, str(proc.root)) is None

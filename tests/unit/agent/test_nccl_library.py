"""NCCL's communicators are suspended and resumed by the copy that the process has loaded, and by no older one."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hegmd.agent.group_backend import NONE, REPLACE, SUSPEND, SUSPENDED, UNKNOWN, UP, GroupBackend
from hegmd.agent.nccl_library import Library
from hegmd.errors import HegmError
from tests.stubs.build import build_stub

COMMUNICATOR = 3


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HEGM_NCCL_STUB_LOG", str(tmp_path / "calls"))
    built = str(build_stub("nccl", tmp_path))
    ctypes.CDLL(built)
    return built


def calls(path: str) -> list[str]:
    log = Path(path).with_name("calls")
    return log.read_text().splitlines() if log.exists() else []


class Store:
    """The keys that the ranks of a group left."""

    def __init__(self, *keys: str) -> None:
        self._keys = keys

    def check(self, keys: list[str]) -> bool:
        return all(key in self._keys for key in keys)


class Current:
    """The device that is current in a thread."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int) -> Current:
        self._next = number
        return self

    def __enter__(self) -> None:
        self.number, self._before = self._next, self.number

    def __exit__(self, *_: object) -> None:
        self.number = self._before


class ProcessGroupNCCL:
    """A backend with a communicator on one GPU, which it tells of where that is the current one."""

    def __init__(self, current: Current, gpu: int | None) -> None:
        self._current, self._gpu = current, gpu

    def _comm_ptr(self) -> int:
        return COMMUNICATOR if self._current.number == self._gpu else 0


def group(gpu: int | None, *keys: str) -> GroupBackend:
    """Rank 1 of two, on a machine with two GPUs."""
    current = Current()
    cuda = SimpleNamespace(device_count=lambda: 2, memory_reserved=lambda number: number == 1, device=current)
    torch: Any = SimpleNamespace(cuda=cuda, _C=None)
    torch.distributed = SimpleNamespace(PrefixStore=lambda _prefix, store: store)
    of: Any = SimpleNamespace(group_name="0", bound_device_id=None, rank=lambda: 1, size=lambda: 2)
    return GroupBackend(torch, of, Store(*keys), ProcessGroupNCCL(current, gpu), [SimpleNamespace(type="cuda")])


def test_a_communicator_is_suspended_and_resumed_on_its_own_gpu(path: str) -> None:
    library, one = Library(path), group(1)
    assert one.mechanism(library) == SUSPEND
    one.suspend(library)
    assert one.state == SUSPENDED
    one.resume(library)
    assert one.state == UP
    assert calls(path) == [f"suspend {COMMUNICATOR} 0", f"resume {COMMUNICATOR} 0"]


@pytest.mark.thorough
def test_a_second_suspend_is_an_error_of_nccls_and_leaves_the_state_unknown(path: str) -> None:
    library, one = Library(path), group(1)
    one.suspend(library)
    with pytest.raises(HegmError, match=r"ncclCommSuspend answered 5 \(invalid usage\) in NCCL 2\.29\.7"):
        one.suspend(library)
    assert one.state == UNKNOWN


@pytest.mark.parametrize("call", ["suspend", "resume"])
def test_a_failed_call_is_reported_with_the_text_of_nccl(path: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, one = Library(path), group(1)
    one.mechanism(library)
    monkeypatch.setenv("HEGM_NCCL_STUB_FAILS", "3")
    with pytest.raises(HegmError, match=rf"ncclComm{call.title()} answered 3 \(internal error\)"):
        getattr(one, call)(library)
    assert one.state == UNKNOWN


@pytest.mark.parametrize(
    ("version", "text", "mechanism"),
    [(22906, "2.29.6", REPLACE), (22907, "2.29.7", SUSPEND), (23007, "2.30.7", SUSPEND), (2803, "2.8.3", REPLACE)],
)
def test_only_a_version_that_can_suspend_gets_the_call(
    path: str, version: int, text: str, mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEGM_NCCL_STUB_VERSION", str(version))
    library = Library(path)
    assert (library.text, group(1).mechanism(library)) == (text, mechanism)


def test_a_library_without_the_function_is_not_called(tmp_path: Path) -> None:
    built = str(build_stub("nccl", tmp_path, hide=["ncclCommResume"]))
    ctypes.CDLL(built)
    assert not Library(built).can_suspend


def test_a_library_that_the_process_has_not_loaded_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(HegmError, match="cannot be called"):
        Library(str(build_stub("nccl", tmp_path)))


def test_communicators_of_pairs_have_the_group_replaced_since_nothing_shows_them(path: str) -> None:
    assert group(1, "0:1").mechanism(Library(path)) == REPLACE


def test_a_group_that_has_not_connected_yet_needs_nothing(path: str) -> None:
    assert group(None).mechanism(Library(path)) == NONE
    assert group(None, "0:1").mechanism(Library(path)) == REPLACE

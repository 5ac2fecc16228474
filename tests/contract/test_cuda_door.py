"""The door to libcuda where a driver is missing, old or at odds, and the stub's faults that other tests build upon.

Each piece of code runs in a process of its own: a process has one libcuda for life.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.patience import HANG_S
from tests.stubs.cuda.node import GIB, CudaNode
from tests.stubs.nvml.scenario import MIB

REPO = Path(__file__).resolve().parents[2]
BEFORE = """
import os
from hegmd.gpu_helper import cuda
from tests.stubs.cuda.rig import DriverRig

def code_of(call, *arguments):
    try:
        call(*arguments)
    except cuda.CudaError as error:
        return error.code
    return 0
"""


@pytest.fixture
def node(tmp_path: Path) -> CudaNode:
    return CudaNode.make(tmp_path, gpu_bytes=2 * GIB)


def run(code: str, node: CudaNode | None, **environment: str) -> str:
    """Return what the code prints, on that node or on a machine without a driver."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "client")]), **environment}
    if node is not None:
        variables |= node.environment() | node.nvml(node.folder / "nvml-scenario").environment() | environment
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + textwrap.dedent(code)],
        cwd=REPO,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


STARTED = """
    try:
        print(cuda.start())
    except cuda.CudaError as error:
        print(error.code, error)
"""


@pytest.mark.thorough
def test_without_a_driver_it_names_what_is_missing(tmp_path: Path) -> None:
    """An empty folder in front of the loader's own cannot hide a real libcuda, so this is for machines without one."""
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a real driver here")
    assert run(STARTED, None, LD_LIBRARY_PATH=str(tmp_path)).startswith("None cuInit: libcuda.so.1 cannot be loaded")


@pytest.mark.thorough
def test_without_the_binding_it_names_what_is_missing(node: CudaNode) -> None:
    code = "import sys; sys.modules['cuda.bindings'] = None\n" + textwrap.dedent(STARTED)
    assert run(code, node).startswith("None cuInit: the Python package cuda-bindings cannot be used")


@pytest.mark.thorough
def test_a_driver_that_does_not_start_is_reported_with_its_own_message(node: CudaNode) -> None:
    node.order("error cuInit 999")
    assert run(STARTED, node) == "999 cuInit: CUDA_ERROR_UNKNOWN (999)"
    node.mend()
    assert run(STARTED, node, CUDA_VISIBLE_DEVICES="") == "100 cuInit: CUDA_ERROR_NO_DEVICE (100)"
    assert run(STARTED, node) == "13000"


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["state(1)", "lock(1, 100)", "checkpoint(1)", "restore(1)", "unlock(1)"])
def test_a_driver_older_than_the_call_is_distinguished_from_one_that_refuses(call: str, tmp_path: Path) -> None:
    """Drivers before 570 have none of the checkpoint calls."""
    functions = ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")
    old = CudaNode.make(tmp_path, hide=tuple(f"cuCheckpointProcess{name}" for name in functions))
    printed = run(
        f"""
        cuda.start()
        try:
            cuda.{call}
        except cuda.CudaError as error:
            print(error.code, error.name)
        """,
        old,
    )
    assert printed == "None not in this driver"


@pytest.mark.thorough
def test_invalid_arguments_never_reach_the_driver(node: CudaNode) -> None:
    printed = run(
        """
        cuda.start()
        for call, *arguments in (
            (cuda.lock, 1, 0),
            (cuda.lock, 1, -5),
            (cuda.open_ipc, b"short"),
            (cuda.restore, 1, [("GPU-1", "GPU-2")]),
            (cuda.restore, 1, [("MIG-5b3a9d10-0000-4000-8000-000000000000",) * 2]),
        ):
            try:
                call(*arguments)
            except ValueError as error:
                print(error)
        """,
        node,
    )
    assert len(printed.splitlines()) == 5
    assert {call.function for call in node.calls()} == {"cuInit"}


@pytest.mark.thorough
def test_no_process_is_queried_before_the_driver_is_initialised(node: CudaNode) -> None:
    """One measurement gave error 3 from every call; another, with NVML open in the process, gave none. The code relies
    on neither.
    """
    printed = run(
        """
        with DriverRig() as rig:
            pid = rig.start(0, 1).pid
            print([code_of(call, pid) for call in (cuda.state, cuda.checkpoint, cuda.restore, cuda.unlock)])
        """,
        node,
    )
    assert printed == "[3, 3, 3, 3]"


@pytest.mark.thorough
def test_devices_are_named_as_nvml_names_them(node: CudaNode) -> None:
    printed = run(
        """
        cuda.start()
        with DriverRig() as rig:
            assert set(rig.look().used_bytes) == {device.uuid for device in cuda.devices()}
        print([(device.ordinal, device.uuid, device.pci, device.total_bytes) for device in cuda.devices()])
        """,
        node,
    )
    first, second = node.uuids
    assert printed == str([(0, first, "0000:19:00.0", 2 * GIB), (1, second, "0000:29:00.0", 2 * GIB)])


@pytest.mark.thorough
def test_a_process_sees_only_its_assigned_devices(node: CudaNode) -> None:
    code = "cuda.start(); print([device.uuid for device in cuda.devices()])"
    first, second = node.uuids
    assert run(code, node, CUDA_VISIBLE_DEVICES="1") == str([second])
    assert run(code, node, CUDA_VISIBLE_DEVICES=f"1,{first}") == str([second, first])
    assert run(code, node, CUDA_VISIBLE_DEVICES="1,7,0") == str([second])


@pytest.mark.thorough
def test_a_target_that_sees_one_gpu_is_moved_by_the_map_of_all(node: CudaNode) -> None:
    run(
        """
        from tests.kit.driver import swapped, take_off
        cuda.start()
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        with DriverRig() as rig:
            target = rig.start(0, 4)
            take_off(target.pid)
            cuda.restore(target.pid, swapped())
            cuda.unlock(target.pid)
            (on,) = [uuid for pid, uuid in rig.look().by_process if pid == target.pid]
            assert on == cuda.devices()[1].uuid
            assert target.ask("uuid") == "uuid " + cuda.devices()[1].uuid
        """,
        node,
    )


@pytest.mark.thorough
def test_rotating_four_gpus_by_one_twice_moves_a_process_by_two(tmp_path: Path) -> None:
    """The map speaks of the GPUs as they are now, not of those that the process began on."""
    node = CudaNode.make(tmp_path, gpus=4)
    run(
        """
        from tests.kit.driver import take_off
        cuda.start()
        uuids = [device.uuid for device in cuda.devices()]
        with DriverRig() as rig:
            target = rig.start(0, 4)
            for expected in (uuids[1], uuids[2]):
                take_off(target.pid)
                cuda.restore(target.pid, zip(uuids, uuids[1:] + uuids[:1], strict=True))
                cuda.unlock(target.pid)
                assert [uuid for pid, uuid in rig.look().by_process if pid == target.pid] == [expected]
        """,
        node,
    )


@pytest.mark.thorough
def test_a_process_cannot_move_to_another_chip(node: CudaNode) -> None:
    node.chips = ["GH100", "AD102"]
    node.write()
    run(
        """
        from tests.kit.driver import swapped, take_off
        cuda.start()
        with DriverRig() as rig:
            target = rig.start(0, 4)
            take_off(target.pid)
            assert code_of(cuda.restore, target.pid, swapped()) == 1
            cuda.restore(target.pid)
            cuda.unlock(target.pid)
            assert target.ask("step") == "step 1"
        """,
        node,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("order", "code"), [("nccl_p2p {}", 801), ("nccl_p2p {} 1", 1), ("lose step:restore@{} 2", 2)])
def test_a_simulated_restore_can_fail_permanently(order: str, code: int, node: CudaNode) -> None:
    """Live peer-to-peer communicators: the checkpoint goes well, and nothing after it ever does."""
    run(
        f"""
        from pathlib import Path
        from tests.kit.driver import take_off
        from tests.stubs.cuda.node import order_in_force
        cuda.start()
        with DriverRig() as rig:
            target = rig.start(0, 4)
            order_in_force(Path(os.environ["HEGM_CUDA_STUB"]), "{order}".format(target.pid))
            take_off(target.pid)
            assert code_of(cuda.restore, target.pid) == {code}
            assert code_of(cuda.restore, target.pid) == cuda.OPERATING_SYSTEM
        """,
        node,
    )


@pytest.mark.thorough
def test_an_order_holds_for_its_gpu_and_its_calls_alone(node: CudaNode) -> None:
    node.order("error cuMemCreate@1 2 2 3")
    printed = run(
        """
        cuda.start()
        unit = cuda.granularity(0)
        print([code_of(cuda.create, ordinal, unit) for ordinal in (1, 1, 1, 1, 0)])
        """,
        node,
    )
    assert printed == "[0, 2, 2, 0, 0]"
    assert [call.subject for call in node.calls("cuMemCreate")] == [1, 1, 1, 1, 0]


@pytest.mark.thorough
def test_memory_that_a_restore_needs_briefly_is_required_too(node: CudaNode) -> None:
    node.restore_bytes = 64 * MIB
    node.context_bytes = 256 * MIB
    node.write()
    run(
        """
        from tests.kit.driver import MIB, swapped, take_off
        cuda.start()
        with DriverRig() as rig:
            target = rig.start(0, 4)
            take_off(target.pid)
            held = cuda.create(1, (2048 - 256 - 4 - 2) * MIB - 32 * MIB)
            assert code_of(cuda.restore, target.pid, swapped()) == cuda.OUT_OF_MEMORY
        """,
        node,
    )


@pytest.mark.thorough
def test_the_kernel_copies_whole_words_and_the_driver_copies_unaligned_rests(node: CudaNode) -> None:
    output = run(
        """
        import ctypes
        from hegmd.gpu_helper.kernel_copy import processors_of

        cuda.start()
        context = cuda.retain(0)
        by = processors_of(0, context)
        stream, one, other = cuda.create_stream(), cuda.allocate(4096), cuda.allocate(4096)
        for at, size_bytes in ((0, 4096), (0, 4095), (16, 15), (8, 64), (0, 1)):
            data = os.urandom(size_bytes)
            ctypes.memset(other, 0, 4096)
            ctypes.memmove(one + at, data, size_bytes)
            by.copy_async(other, one + at, size_bytes, stream)
            cuda.synchronize(stream)
            print(ctypes.string_at(other, 4096) == data + bytes(4096 - size_bytes))
        by.close()
        """,
        node,
    )
    assert output.split() == ["True"] * 5
    assert len(node.calls("cuLaunchKernel")) == 2


@pytest.mark.thorough
def test_two_in_one_process_do_not_take_each_others_functions(node: CudaNode) -> None:
    """The stubs of libcuda and libnvidia-ml have functions of one name; the loader would join what is global."""
    node.nvml(node.folder / "nvml-scenario")
    printed = run(
        f"""
        import ctypes
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            ctypes.CDLL(os.path.join({str(node.folder)!r}, name), ctypes.RTLD_GLOBAL)
        cuda.start()
        with DriverRig() as rig:
            target = rig.start(0, 4)
            print(sorted(rig.look().by_process.values()))
        """,
        node,
    )
    assert printed == str([516 * MIB + 512])

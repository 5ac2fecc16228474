"""The devices of restored tensors in a process with other devices, and what is kept of absent GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hegmd.agent.state.code.encoding import Decoding
from hegmd.agent.state.storage import tensors
from hegmd.agent.state.values import devices, rng
from tests.needs import need_torch

pytestmark = [pytest.mark.xdist_group("torch")]
torch: Any = need_torch()

GPU = "cuda:1"


def saved_on(device: object) -> Any:
    tensor = torch.ones(3)
    setattr(tensor, tensors.WAS_ON, torch.device(device))
    return tensor


def settled(saved: Any, here: Any) -> Any:
    return Decoding().settle(("tensor", saved, False), here, "mean")


def test_a_gpu_tensor_could_not_be_restored_without_a_gpu() -> None:
    """PyTorch was asked for the GPU that it had been on, and ended the restart."""
    assert settled(saved_on(GPU), None).device.type == "cpu"
    assert settled(saved_on(GPU), torch.zeros(3)).device.type == "cpu"


def test_a_tensor_saved_on_the_cpu_is_restored_on_the_scripts_device() -> None:
    here, saved = torch.empty(3, device="meta"), saved_on(torch.device("cpu"))
    assert devices.device_beside(saved, here, from_cpu=True).type == "meta"
    assert devices.device_beside(saved, None, from_cpu=True).type == "cpu"
    assert devices.device_beside(saved, here, from_cpu=False).type == "cpu", "the script had brought it there itself"


class Here:
    """A tensor of the script."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


@pytest.fixture
def learned() -> Iterator[Callable[..., None]]:
    """Has the parameters of the script be now on other GPUs than before."""

    def learn(**places: str) -> None:
        pairs = [(saved_on(gpu(int(was[-1]))), Here(now)) for was, now in places.items()]
        devices.learn_places([*pairs, (saved_on(torch.device("cpu")), Here("cpu"))])

    yield learn
    devices.learn_places(())


def gpu(number: int) -> Any:
    return torch.device("cuda", number)


def test_a_tensor_of_one_of_several_gpus_went_to_the_current_one(learned: Callable[..., None]) -> None:
    """The first step after the restart failed: tensors that belong together were on two GPUs."""
    learned(cuda0="cuda:0", cuda1="cuda:1")
    assert [devices.device_like(gpu(number)) for number in range(2)] == [gpu(0), gpu(1)]
    assert devices.device_like(torch.device("cpu")).type == "cpu"
    assert devices.keeps_number(gpu(2), 3), "a GPU without a parameter has its number"
    assert not devices.keeps_number(gpu(2), 2)


def test_a_tensor_is_restored_on_the_gpu_of_its_parameters(learned: Callable[..., None]) -> None:
    learned(cuda1="cuda:0")
    assert devices.device_like(gpu(1)) == gpu(0), "as of a rank that shares a GPU now"
    assert not devices.keeps_number(gpu(0), 2), "whose parameters were on another"
    learned()
    assert not devices.keeps_number(gpu(1), 2), "nothing is known of its GPUs"


def test_a_variable_on_another_gpu_than_at_first_is_put_back_on_that(learned: Callable[..., None]) -> None:
    learned(cuda0="cuda:0", cuda1="cuda:1")
    on_first_gpu = type("OnFirstGpu", (torch.Tensor,), {"device": gpu(0)})
    first = torch.empty(3).as_subclass(on_first_gpu)
    assert devices.device_beside(saved_on(GPU), first, from_cpu=False) == gpu(1)


def test_a_training_has_left_the_cpu_when_all_of_its_tensors_were_there_and_some_are_on_a_gpu() -> None:
    cpu = torch.ones(3)
    assert devices.left_cpu([(saved_on(cpu.device), Here(GPU)), (saved_on(cpu.device), cpu)])
    assert not devices.left_cpu([(saved_on(cpu.device), cpu)])
    assert not devices.left_cpu([(saved_on(GPU), Here(GPU)), (saved_on(cpu.device), cpu)])
    assert not devices.left_cpu([])


def test_random_numbers_of_a_gpu_were_lost_on_the_cpu_and_are_kept_for_the_return() -> None:
    before = rng.read_shared()
    rng.set_shared({**before, "cuda:7": b"its state"})
    assert rng.read_shared()["cuda:7"] == b"its state"
    assert "cuda:7" not in rng.read_shared(with_gpus=False)


def test_a_generator_on_a_gpu_is_another_one_than_on_the_cpu() -> None:
    mine = torch.Generator()
    assert rng.fits(mine, rng.read(mine))
    assert not rng.fits(mine, bytes(16)), "which a generator on a GPU has"

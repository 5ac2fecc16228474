"""The contents of an optimizer return to where they were: next to its parameter, or on the CPU.

`meta` takes the place of a GPU: it is another device, and a tensor there has no bytes.
"""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.agent.state.storage import state_file, tensors
from hegmd.agent.state.values import contents
from tests.needs import need_torch
from tests.unit.agent.state.in_file import through_a_file

pytestmark = [pytest.mark.xdist_group("torch")]
torch: Any = need_torch()


class Optimizer:
    """The parts of an optimizer that the agent reads; a real one would make PyTorch import its compiler."""

    def __init__(self, device: str, **options: Any) -> None:
        parameter = torch.nn.Parameter(torch.ones(3, device=device))
        self.param_groups: list[dict[str, Any]] = [{"params": [parameter], "lr": 0.1, **options}]
        self.state: dict[Any, dict[str, Any]] = {
            parameter: {"momentum_buffer": torch.full((3,), 2.0), "step": torch.tensor(7.0)}
        }


def test_moments_of_a_gpu_went_to_the_cpu_when_they_were_put_back() -> None:
    """A tensor that was read lies in the file's memory; where it was is not where it is. `meta` plays the GPU here."""
    found = through_a_file(contents.take_optimizer(Optimizer("cpu"), {}))
    (((where, key, _device),),) = (group["params"] for group in found["groups"])
    found["groups"][0]["params"] = [(where, key, "cuda")]
    setattr(found["states"][0]["momentum_buffer"], tensors.WAS_ON, torch.device("cuda:0"))
    put = Optimizer("meta")
    contents.put_optimizer(put, found, {}.get)
    contents.make_copies()
    (state,) = put.state.values()
    assert state["momentum_buffer"].device.type == "meta"
    assert state["step"].device.type == "cpu"
    assert state["step"] == 7.0


def test_counts_of_steps_went_to_the_gpu_with_the_moments_and_each_step_waited_for_them() -> None:
    """From the CPU everything beside a parameter is on the CPU; PyTorch reads the counts there unless it is fused."""
    for options, counts_on in (({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")):
        put = Optimizer("meta", **options)
        contents.put_optimizer(put, through_a_file(contents.take_optimizer(Optimizer("cpu"), {})), {}.get)
        contents.make_copies()
        (state,) = put.state.values()
        assert (state["momentum_buffer"].device.type, state["step"].device.type) == ("meta", counts_on)


def test_device_specific_settings_of_steps_are_reported_and_not_restored_on_another_device() -> None:
    """`fused=torch.cuda.is_available()` was False on the GPU too, and `capturable` of a GPU failed on the CPU."""
    before = Optimizer("meta", fused=True, capturable=True, foreach=None)
    taken = contents.take_optimizer(before, {})
    taken["states"] = [None]  # which has no bytes on `meta`
    taken["own"] = [(torch.ones(3), None, True)]
    put = Optimizer("cpu", fused=None, capturable=False, foreach=None)
    put.param_groups[0]["lr"] = 7.0
    notes = contents.put_optimizer(put, taken, {}.get)
    assert {name: put.param_groups[0][name] for name in ("fused", "capturable", "lr")} == {
        "fused": None,
        "capturable": False,
        "lr": 0.1,
    }
    assert notes == ["fused was True on meta and is None on cpu", "capturable was True on meta and is False on cpu"]
    same = Optimizer("cpu", fused=False)
    assert contents.put_optimizer(same, contents.take_optimizer(Optimizer("cpu", fused=True), {}), {}.get) == []
    assert same.param_groups[0]["fused"] is True
    contents.make_copies()


def test_large_and_small_tensors_are_complete_after_all_copies() -> None:
    value = {"large": torch.arange(1 << 18), "small": torch.ones(3, requires_grad=True)}
    found = contents.owned(value)
    contents.make_copies()
    assert torch.equal(found["large"], value["large"])
    assert torch.equal(found["small"], value["small"])
    assert found["small"].requires_grad
    assert found["large"].data_ptr() != value["large"].data_ptr()


def test_optimizer_state_outside_of_parameters_is_kept() -> None:
    before, put = Optimizer("cpu"), Optimizer("cpu")
    before.state["seen"] = {"batches": 16, "mean": torch.ones(2)}
    put.state["begun"] = {}
    contents.put_optimizer(put, through_a_file(contents.take_optimizer(before, {})), {}.get)
    contents.make_copies()
    (parameter,) = put.param_groups[0]["params"]
    assert list(put.state) == [parameter, "seen"]
    assert str(put.state["seen"]) == str(before.state["seen"])


def test_optimizer_state_of_a_foreign_tensor_cannot_be_saved() -> None:
    before = Optimizer("cpu")
    before.state[torch.nn.Parameter(torch.ones(2))] = {"seen": torch.ones(2)}
    with pytest.raises(state_file.UnsupportedValue):
        through_a_file(contents.take_optimizer(before, {}))


def test_a_buffer_that_has_two_names_is_known_by_both() -> None:
    module = torch.nn.Module()
    module.register_buffer("mask", torch.ones(2))
    module.register_buffer("same", module.mask)
    assert [name for name, _ in contents._tensors_of(module)] == ["mask", "same"]

"""Models whose parameters are spread over ranks by DTensor: their state goes through a file and back, in one process.

FSDP2, tensor parallel and DTensor jobs could not be restarted or recovered, although the README said so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from hegmd.agent.state.script.discovery import MODULE, ScriptSearch
from hegmd.agent.state.values import contents, sharded
from tests.needs import ImportedWhenUsed, need_torch
from tests.unit.agent.state.in_file import through_a_file

pytestmark = [
    pytest.mark.leaks_allowed("PyTorch sets variables of its own when its compiler is first imported"),
    pytest.mark.xdist_group("torch"),
]
torch: Any = need_torch()
fsdp: Any = ImportedWhenUsed("torch.distributed.fsdp")
tensors: Any = ImportedWhenUsed("torch.distributed.tensor")
stages: Any = ImportedWhenUsed("torch.distributed.pipelining")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A job of one rank."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Momentum:
    """An optimizer with the parts that the agent reads; one of PyTorch's would import its compiler."""

    def __init__(self, model: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": 0.1}]
        self.state: dict[Any, dict[str, Any]] = {}

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                kept = self.state.setdefault(parameter, {"momentum": torch.zeros_like(parameter)})
                parameter.sub_(kept["momentum"].mul_(0.9).add_(parameter.grad), alpha=0.1)


def _sharded() -> tuple[Any, Momentum]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    for layer in (model[0], model[2], model):
        fsdp.fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    return model, Momentum(model)


def _step(model: Any, optimizer: Momentum) -> str:
    model.zero_grad()
    loss = model(torch.ones(3, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach()).hex()


def test_fsdp_models_had_no_state() -> None:
    model, optimizer = _sharded()
    _step(model, optimizer)
    names = {id(parameter): (0, name) for name, parameter in model.named_parameters()}
    taken = through_a_file([contents.take_module(model), contents.take_optimizer(optimizer, names)])
    gradients = [sharded.local(parameter.grad).clone() for parameter in model.parameters()]
    expected = [_step(model, optimizer) for _ in range(3)]
    other, its = _sharded()
    assert contents.unfit_module(other, taken[0]) == []
    contents.put_module(other, taken[0])
    contents.put_optimizer(its, taken[1], lambda _reference: None)
    contents.make_copies()
    assert all(sharded.is_spread(parameter.grad) for parameter in other.parameters())
    found = [sharded.local(parameter.grad) for parameter in other.parameters()]
    assert all(torch.equal(one, before) for one, before in zip(found, gradients, strict=True))
    assert [_step(other, its) for _ in range(3)] == expected


def test_a_part_of_a_part_could_not_be_made_again() -> None:
    """FSDP2 over tensor parallel: the class of its placement takes names only, and the job failed in its restart."""
    strided = tensors.placement_types._StridedShard(0, split_factor=2)
    mesh = torch.distributed.init_device_mesh("cpu", (1, 1))
    spread = tensors.DTensor.from_local(torch.ones(2), mesh, [strided, tensors.Shard(0)], run_check=False)
    saved = through_a_file(sharded.taken(spread))
    again = sharded.made(sharded.part_of(saved), saved, spread)
    assert (again.placements, again.shape) == (spread.placements, spread.shape)


def test_a_parameter_with_another_layout_does_not_fit() -> None:
    model, _optimizer = _sharded()
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    taken = contents.take_module(plain)
    taken["class"] = type(model).__qualname__
    assert contents.unfit_module(model, taken)[0].startswith(
        "0.weight is spread over ranks as ((1,), (), (('Shard', 0)"
    )


def test_a_module_with_gradients_of_an_accumulation_has_no_state_until_they_are_summed() -> None:
    model, optimizer = _sharded()
    model.set_requires_gradient_sync(False)
    model(torch.ones(3, 4)).sum().backward()
    assert sharded.pending_in(model) == "it has gradients that are not summed over its ranks yet"
    assert sharded.is_accumulating()
    model.set_requires_gradient_sync(True)
    _step(model, optimizer)
    assert sharded.pending_in(model) is None
    assert not sharded.is_accumulating()


def test_the_views_that_fsdp_has_of_parameters_failed_a_restart() -> None:
    """They were saved as the script's own tensors, and the restarted script has them under other names."""
    model, optimizer = _sharded()
    _step(model, optimizer)
    found = ScriptSearch([sys._getframe()]).list
    names = [name for one in found for name in one.names if "model" in name and one.kind != MODULE]
    assert not [name for name in names if "_sharded_param_data" in name or "<self>" in name]


def test_the_buffers_of_a_pipeline_stage_failed_a_restart() -> None:
    """A stage makes them in its first step, so the restarted script has none where it continues."""
    stage = object.__new__(stages.PipelineStage)
    stage.submod, stage.received = torch.nn.Linear(2, 2), torch.zeros(3)
    found = {name: one.kind for one in ScriptSearch([sys._getframe()]).list for name in one.names}
    ours = {name.rpartition("stage.")[2]: kind for name, kind in found.items() if "stage." in name}
    assert ours == {"submod": MODULE}


def _skipping(ddp: Any) -> bool:
    with ddp.no_sync():
        return sharded.accumulates_statically(ddp, [sys._getframe()])


def test_a_static_graph_that_was_restarted_within_an_accumulation_failed() -> None:
    """Its first batch was under `no_sync`, where PyTorch fails unless an earlier one was not."""
    dynamic, static = (
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), static_graph=is_static)
        for is_static in (False, True)
    )
    assert not _skipping(dynamic)
    assert _skipping(static), "the script says so"
    assert not sharded.accumulates_statically(static, [])
    static(torch.ones(1, 2)).sum().backward()
    for is_last in (False, True):
        static.require_backward_grad_sync = is_last
        static(torch.ones(1, 2)).sum().backward()
        assert sharded.accumulates_statically(static, []) != is_last, "it was seen"

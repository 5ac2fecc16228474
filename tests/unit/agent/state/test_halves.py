"""Scripts that were restarted and had other numbers than undisturbed ones, each named after what was lost.

All of them run in one process, which imports PyTorch once. Longer than 400 lines because of that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import HANG_S

pytestmark = [pytest.mark.xdist_group("halves")]

ROOT = Path(__file__).parents[4]

SCRIPTS = {
    "added": """
import numpy
import torch

def train(begin):
    counts, total, flags, shown = numpy.zeros(3), numpy.zeros(2), numpy.zeros(2, dtype=bool), [None]
    shown[0] = total
    for step in range(begin, 9):
        at(step)
        numpy.add.at(counts, [step % 3], step)
        numpy.add(total, 1, out=total)
        numpy.logical_not(flags, out=flags)
    return [counts.tolist(), shown[0].tolist(), flags.tolist()]
""",
    "spawning": """
import numpy
import torch

rng, seeds = numpy.random.default_rng(3), numpy.random.SeedSequence(4)

def train(begin):
    for step in range(begin, 9):
        at(step)
        own = rng.spawn(1)[0].random()
        other = numpy.random.default_rng(seeds.spawn(1)[0]).random()
    return [own, other, rng.random()]
""",
    "scripted": """
import torch
import warnings

warnings.simplefilter("ignore")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.sums = [0.0]
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        self.last = x * self.calls
        self.sums.append(float(self.last.sum()))
        return self.last

model = torch.jit.script(Model())

def train(begin):
    for step in range(begin, 9):
        at(step)
        model(torch.full((2,), float(step)))
    return [model.calls, model.sums, model.last.sum().item()]
""",
    "aliased": """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
base = torch.zeros(4, 2)

def train(begin):
    best = row = None
    for step in range(begin, 9):
        at(step)
        if step == 3:
            best, row = model.state_dict(), base[1]
        with torch.no_grad():
            model.weight.add_(1)
        base.add_(1)
    return [best["weight"].sum().item(), row.sum().item()]
""",
    "views": """
import torch

buffer = torch.zeros(100)
head = buffer[:10]

def train(begin):
    for step in range(begin, 9):
        at(step)
        buffer.add_(1)
    return [buffer[0].item(), buffer[50].item()]
""",
    "speaking": """
import random
import torch

class Agent:
    def __init__(self):
        self.policy = torch.nn.Linear(200, 200)
        self.moment = torch.zeros(1)
        self.rng = random.Random(3)
        self.calls = 0

    def state_dict(self):
        return self.policy.state_dict()

    def load_state_dict(self, state):
        self.policy.load_state_dict(state)

    def learn(self):
        self.calls += 1
        self.moment.mul_(0.9).add_(self.rng.random())
        with torch.no_grad():
            self.policy.weight.add_(self.moment)

class Average:
    def __init__(self):
        self.made = {"sum": torch.zeros(40000)}

    def state_dict(self):
        return {"made": dict(self.made)}

    def load_state_dict(self, state):
        for name, value in state["made"].items():
            self.made[name] = value * 1

torch.manual_seed(0)
agent, average = Agent(), Average()

def train(begin):
    for step in range(begin, 9):
        at(step)
        agent.learn()
        average.made = {"sum": average.made["sum"] + 1}
    weight = agent.policy.weight.double().sum().item()
    return [agent.calls, agent.moment.item(), weight, average.made["sum"].sum().item()]
""",
    "inner": """
import torch

class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gen = torch.Generator().manual_seed(1)
        self.seen = torch.zeros(1)

    def forward(self, x):
        torch.add(self.seen, 1, out=self.seen)
        return x + torch.rand(1, generator=self.gen)

def nested(depth):
    return torch.nn.Sequential(nested(depth - 1)) if depth else Noise()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nested(12)

net = Net()

def train(begin):
    total = 0.0
    for step in range(begin, 9):
        at(step)
        total += net.body(torch.zeros(1)).item()
    noise = list(net.modules())[-1]
    return [total, noise.seen.item()]
""",
    "drawing": """
import functools
import random

class Augment:
    rng = random.Random(5)

    @classmethod
    def draw(cls):
        return cls.rng.random()

    @staticmethod
    def fixed(rng=random.Random(9)):
        return rng.random()

class Turned(Augment):
    pass

def by_default(rng=random.Random(6), *, other=random.Random(7)):
    return rng.random() + other.random()

def by_attribute():
    return by_attribute.rng.random()

by_attribute.rng = random.Random(8)
partly = functools.partial(lambda rng: rng.random(), random.Random(10))
bound = random.Random(11).random
shared = random.random

def train(begin):
    sums = [0.0] * 7
    for step in range(begin, 9):
        at(step)
        from random import uniform
        drawn = [Turned.draw(), Augment.fixed(), by_default(), by_attribute(), partly(), bound(), uniform(0, 1)]
        sums = [one + other for one, other in zip(sums, drawn)]
    return sums
""",
    "inferring": """
import torch

with torch.inference_mode():
    features = torch.ones(3)
    written = torch.zeros(3)
    turned = torch.zeros(2, 3).t()
counted = torch.zeros(1)

def train(begin):
    for step in range(begin, 9):
        at(step)
        torch.add(counted, 1, out=counted)
        with torch.inference_mode():
            torch.add(written, features, out=written)
            torch.add(turned, 1, out=turned)
    return [counted.item(), written.sum().item(), turned.sum().item()]
""",
    "aside": """
import numpy
import torch

class Shadow:
    def __init__(self):
        self.mean = torch.zeros(1)
        self.data = []

mean = torch.zeros(1)
large = torch.zeros(6 << 20)
small = torch.zeros(9)
shadow = Shadow()
replaced = torch.zeros(1)

def train(begin):
    for step in range(begin, 9):
        at(step)
        mean.data.mul_(0.9).add_(0.1)
        shadow.mean.data[0] = shadow.mean.data[0] + 1
        shadow.data.append(step)
        replaced.data = replaced.data + 1
        for tensor in (large, small):
            numpy.add(tensor.numpy(), 1, out=tensor.numpy())
    return [mean.item(), shadow.mean.item(), shadow.data, replaced.item(), large[5].item(), small.sum().item()]
""",
    "keyed": """
import enum
import torch

class Part(enum.Enum):
    NOISE = 1

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
optimizers = {parameter: torch.optim.Adam([parameter], 0.1) for parameter in model.parameters()}
by_part = {Part.NOISE: torch.Generator().manual_seed(2), (1, 2): torch.nn.Linear(1, 1), None: torch.zeros(1)}

class Meter:
    count = 0

    def update(self):
        self.count += 1

meters = {Part.NOISE: Meter(), **{parameter: Meter() for parameter in model.parameters()}}
sums = {id(parameter): torch.zeros(1) for parameter in model.parameters()}
counts, seen, order = {}, set(), []

def step_at_once(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_at_once)

def train(begin):
    for step in range(begin, 9):
        at(step)
        noise = torch.rand(2, 3, generator=by_part[Part.NOISE])
        model(noise).sum().backward()
        with torch.no_grad():
            by_part[1, 2].weight.mul_(0.9)
            by_part[None].add_(1)
        for key, parameter in zip(map(id, model.parameters()), model.parameters()):
            meters[parameter].update()
            meters[Part.NOISE].update()
            sums[key].add_(1)
            counts[key] = counts.get(key, 0) + 1
            if step == 2:
                seen.add(key)
                order.append(key)
    ids = [id(parameter) for parameter in model.parameters()]
    numbers = [meter.count for meter in meters.values()], [int(one) for one in sums.values()], list(counts.values())
    output = model(torch.ones(3)).item(), by_part[1, 2].weight.item(), by_part[None].item()
    return [*output, *numbers, seen == set(ids), order == ids]
""",
    "thawed": """
import torch

torch.manual_seed(0)
body, head = torch.nn.Sequential(torch.nn.LazyLinear(4)), torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(head.parameters(), 0.1)
decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

def train(begin):
    for step in range(begin, 9):
        at(step)
        if step == 3:
            optimizer.add_param_group({"params": body.parameters(), "lr": 0.01, "betas": (0.5, 0.9)})
            decay.base_lrs.append(0.01)
        head(body(torch.ones(2, 3) * step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    return [head(body(torch.ones(3))).item(), rates, [group["betas"] for group in optimizer.param_groups]]
""",
    "observed": """
import torch
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

torch.manual_seed(0)
layer = torch.nn.Linear(3, 4)
rounded = FakeQuantize(MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8)

def train(begin):
    total = 0.0
    for step in range(begin, 9):
        at(step)
        with torch.no_grad():
            layer.weight.mul_(1.1)
        total += rounded(layer.weight).sum().item()
    return [total, rounded.scale.sum().item()]
""",
    "replaced": """
import dataclasses
import enum

class Marks(enum.IntFlag):
    CLIP = 1
    NOISE = 2

class Kinds(enum.Flag):
    ONE = enum.auto()
    TWO = enum.auto()

@dataclasses.dataclass(frozen=True)
class Progress:
    step: int = 0
    phase: str = "warm"

@dataclasses.dataclass(frozen=True, **({"slots": True} if "slots" in dataclasses.dataclass.__kwdefaults__ else {}))
class Sums:
    spent: tuple = (0,)

FIRST = Progress()

class Trainer:
    def __init__(self):
        self.progress, self.sums, self.own = FIRST, Sums(), Progress()
        self.marks, self.kinds = Marks(0), Kinds.ONE

    def step(self):
        self.progress = dataclasses.replace(self.progress, step=self.progress.step + 1)
        self.sums = Sums((self.sums.spent[0] + 1,))
        self.own = dataclasses.replace(self.own, step=self.own.step + 2, phase="main")
        self.marks, self.kinds = Marks.CLIP | Marks.NOISE, self.kinds | Kinds.TWO

trainer = Trainer()

def train(begin):
    for epoch in range(1):
        local = Progress()
        for step in range(begin, 9):
            at(step)
            trainer.step()
            local = dataclasses.replace(local, step=local.step + 3)
    return [repr(found) for found in (*vars(trainer).values(), local, FIRST)]
""",
    "context": """
import contextvars

scale, fixed = contextvars.ContextVar("scale", default=1.0), contextvars.ContextVar("fixed", default=1.0)

def train(begin):
    for step in range(begin, 9):
        at(step)
        scale.set(scale.get() * fixed.get() / 2)
    return []
""",
    "hooked": """
import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

model = torch.nn.Linear(2, 1)
state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
model._comm_hooks = [(print, state), (print, PostLocalSGDState(None, None, 10))]

def library(state, local):  # what the hooks do, which are code of PyTorch's
    object.__setattr__(state, *("iter", state.iter + 1))
    object.__setattr__(local, *("iter", local.iter + 1))
    state.error_dict.setdefault(0, torch.zeros(2)).add_(float(state.rng.rand()))

def train(begin):
    for step in range(begin, 9):
        at(step)
        library(state, model._comm_hooks[1][1])
    return [state.iter, state.error_dict[0].tolist(), model._comm_hooks[1][1].iter]
""",
    "pruned": """
import torch
from torch.nn.utils import prune

torch.manual_seed(0)
layer = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
grown = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
swept = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)

def train(begin):
    for step in range(begin, 9):
        at(step)
        if step == 3 and not begin:
            prune.random_unstructured(layer, "weight", 0.5)
            grown.append(torch.nn.Linear(1, 1))
            swept.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    return []
""",
}
#: These cannot continue: what is under test is that they are refused before they end.
REFUSED = frozenset(("plain", "pruned"))


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return for each script its undisturbed output, what restarted, and the notes about it."""
    return in_one_process(tmp_path_factory.mktemp("scripts"), SCRIPTS)


def in_one_process(folder: Path, scripts: dict[str, str]) -> dict[str, Any]:
    """Return the same of these scripts."""
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    files = [f"{'-' if name in REFUSED else ''}{folder}/{name}.py" for name in scripts]
    argv = [sys.executable, "-m", "tests.unit.agent.state.twice", *files]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_exact(found: dict[str, Any]) -> None:
    """The second half ended as the undisturbed run did, and nothing was reported to be lost."""
    assert found["halves"] == found["whole"]
    assert (found["refusals"], found["anew"], found["unseen"]) == ([], [], [])


PLAIN = """
def train(begin):
    total = 0
    for step in range(begin, 9):
        at(step)
        total += step
    return total
"""


def test_a_script_without_pytorch_was_ended_and_ran_again_from_its_beginning(tmp_path: Path) -> None:
    """Four times, each to its end: nothing brought it to its saved place, and nothing stopped it."""
    found = in_one_process(tmp_path, {"plain": PLAIN})["plain"]
    assert found["refusals"] == ["the script does not use PyTorch, so nothing would bring a new process to this place"]


@pytest.mark.thorough
def test_a_state_dict_that_is_no_copy_sees_the_steps_after_a_restart(halves: dict[str, Any]) -> None:
    """`best = model.state_dict()` has the model's own memory, and had a copy of it after a restart, as had views."""
    assert_exact(halves["aliased"])


@pytest.mark.thorough
def test_attributes_that_a_compiled_script_module_counts_in_are_kept(halves: dict[str, Any]) -> None:
    """They are TorchScript's own, not in the module's dictionary, and began again without a word."""
    assert_exact(halves["scripted"])


@pytest.mark.thorough
def test_generators_that_numpy_spawns_in_each_batch_are_other_ones_after_a_restart(halves: dict[str, Any]) -> None:
    """The count of children is not in a generator's state: they began again with the first, without a word."""
    assert_exact(halves["spawning"])


@pytest.mark.thorough
def test_arrays_that_functions_of_numpy_change_are_kept(halves: dict[str, Any]) -> None:
    """Those of a function began again without a word: no code names the array as the target of `out=` or `add.at`."""
    assert_exact(halves["added"])


@pytest.mark.thorough
def test_a_view_at_the_start_of_a_buffer_keeps_the_rest_of_the_buffer(halves: dict[str, Any]) -> None:
    assert_exact(halves["views"])


@pytest.mark.thorough
def test_attributes_missing_from_a_script_objects_state_dict_are_kept(halves: dict[str, Any]) -> None:
    """And a `load_state_dict` that copied large tensors copied them before they were there."""
    assert_exact(halves["speaking"])


@pytest.mark.thorough
def test_generators_and_tensors_of_inner_modules_are_kept(halves: dict[str, Any]) -> None:
    assert_exact(halves["inner"])


@pytest.mark.thorough
def test_generators_of_classes_defaults_and_partial_functions_are_kept(halves: dict[str, Any]) -> None:
    assert_exact(halves["drawing"])


@pytest.mark.thorough
def test_a_tensor_made_in_inference_mode_does_not_make_the_others_start_over(halves: dict[str, Any]) -> None:
    assert_exact(halves["inferring"])


@pytest.mark.thorough
def test_a_tensor_written_through_its_data_or_numpy_is_kept(halves: dict[str, Any]) -> None:
    assert_exact(halves["aside"])


@pytest.mark.thorough
def test_optimizers_and_generators_in_dictionaries_keyed_by_objects_are_kept(halves: dict[str, Any]) -> None:
    """An optimizer for each parameter, which steps within the backward pass, lost its state without a refusal.

    A training with tensors by `id(parameter)` was lost, and counts by it began again.
    """
    assert_exact(halves["keyed"])


@pytest.mark.thorough
def test_an_attribute_that_gets_a_new_object_in_each_step_is_kept(halves: dict[str, Any]) -> None:
    """The new object was taken for the one that the restarted script has there: its counts began again, unsaid."""
    assert_exact(halves["replaced"])


@pytest.mark.thorough
def test_groups_that_an_optimizer_got_in_the_loop_are_kept(halves: dict[str, Any]) -> None:
    """A training that thawed layers as it went ended at its restart. So did one with parameters of a lazy module."""
    assert_exact(halves["thawed"])


@pytest.mark.thorough
def test_observers_that_got_their_shape_in_the_loop_are_kept(halves: dict[str, Any]) -> None:
    assert_exact(halves["observed"])


@pytest.mark.thorough
def test_a_model_that_changed_after_the_first_batch_is_refused_and_not_lost(halves: dict[str, Any]) -> None:
    """The state was saved, and no restarted script could take it."""
    changed = "was changed after the first batch"
    after = "; a restarted script would have the former one where it continues"
    assert sorted(halves["pruned"]["refusals"]) == [
        f"pruned.grown, a ModuleList, {changed}: 1.weight is new, and 1 more{after}",
        f"pruned.layer, a Linear, {changed}: weight_orig is new, and 2 more{after}",
        f"pruned.optimizer, a SGD, {changed}: its groups have other parameters{after}",
        f"pruned.swept, a SGD, {changed}: its groups have other parameters{after}",
    ]


@pytest.mark.thorough
def test_a_context_variable_that_the_loop_sets_is_named(halves: dict[str, Any]) -> None:
    """It began again, unsaid: no other thread can read it."""
    assert halves["context"]["anew"] == ["scale (ContextVar) of context"]


@pytest.mark.thorough
def test_states_of_communication_hooks_are_kept(halves: dict[str, Any]) -> None:
    """PowerSGD and PostLocalSGD of DDP began again, unsaid: they count in attributes, and have no `state_dict`."""
    assert_exact(halves["hooked"])

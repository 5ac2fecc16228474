"""Ranks that train over gloo, and whose groups the agent's own code disconnects and connects again between steps.

    python tests/e2e/ranks_alone.py N tests/contract/grouped.py FOLDER

Each kind of training runs undisturbed first and then disturbed, in the same processes. While its groups are
disconnected, all bytes leave it and return, the gradient buckets of DDP too. A rank whose checks all passed writes its
number into FOLDER. A failed assertion ends its rank, and the others fail when they wait for it.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from hegmd.agent import reducer_buckets, torch_state, transfer
from hegmd.agent.communicators import ProcessGroups
from hegmd.agent.trap import NoCollection
from hegmd.errors import HegmError

STEPS, EVERY = 9, 2
LIMIT_S, SHORT_S = 120.0, 1.0
# PyTorch before 2.6 has FSDP2 for GPUs only.
HAS_FSDP2 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
Between = Callable[[int], None]


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))


def losses_of(model: torch.nn.Module, reduced: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[str]:
    """One training step for each item. Every rank has its own batches."""
    optimizer = torch.optim.Adam(model.parameters())
    drawn = torch.Generator().manual_seed(100 + distributed.get_rank())
    while True:
        loss = model(torch.randn(8, 64, generator=drawn)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(reduced(loss.detach().clone())).hex()


def by_group(group: object, loss: torch.Tensor) -> torch.Tensor:
    distributed.all_reduce(loss, group=group)
    return loss


def ddp(pair: object) -> Iterator[str]:
    """DDP in the default group, and its losses summed in a group from `new_group`; without one, in no group."""
    model = torch.nn.parallel.DistributedDataParallel(layers())
    return losses_of(model, partial(by_group, pair) if pair is not None else lambda loss: loss)


def fsdp(mesh: object) -> Iterator[str]:
    """FSDP2 on a device mesh, and its losses summed by a functional collective, which knows the group by its name."""
    from torch.distributed.fsdp import fully_shard

    model = layers()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return losses_of(model, lambda loss: functional.all_reduce(loss, "sum", mesh))


def run(training: Iterator[str], between: Between) -> list[str]:
    found: list[str] = []
    for step in range(STEPS):
        between(step)
        found.append(next(training))
    return found


def refused(call: Callable[[], object]) -> str:
    """The message and the hint of the refusal that this call has to end with. A kept error keeps all groups."""
    with NoCollection():
        try:
            call()
        except HegmError as error:
            text, known = f"{error.message}; {error.hint}", weakref.ref(error)
        else:
            raise AssertionError("nothing was refused")
        assert known() is None, "the error stays until the garbage collector runs"
    return text


class Disturber:
    """Has the agent's code take all groups down and up again every few steps."""

    def __init__(self) -> None:
        self._groups = ProcessGroups()
        self._times = 0
        self.buckets = 0

    def __call__(self, step: int) -> None:
        if step % EVERY:
            return
        self._times += 1
        disconnected = self._groups.disconnect(LIMIT_S)
        assert disconnected is not None
        assert (disconnected.mechanism, disconnected.uncovered) == ("replace", ()), disconnected
        assert self._groups.is_down
        assert self._groups.disconnect(LIMIT_S) == disconnected  # done already
        self._move_bytes()
        self._groups.reconnect(self._times, LIMIT_S)
        assert not self._groups.is_down
        self._groups.reconnect(self._times, LIMIT_S)  # done already
        names = {group.group_name for group in distributed.distributed_c10d._world.pg_map}
        assert names == set(distributed.distributed_c10d._world.pg_names.values())

    def _move_bytes(self) -> None:
        found = torch_state.find()
        self.buckets += sum(storage._cdata in found.buckets for storage in found.storages)
        memory = os.memfd_create("bytes")
        os.truncate(memory, transfer.required_bytes(found.sizes))
        out = transfer.offload(memory, found.storages, found.sizes, lambda _so_far_bytes: None)
        assert not any(storage.nbytes() for storage in found.storages)
        out.bring_back(memory, lambda _so_far_bytes: None)
        out.close()


def one_rank_is_missing(step: int, groups: ProcessGroups, missing: int) -> None:
    """The others change nothing, name that rank and train on; and bring their groups up only when it comes."""
    if step == 1 and distributed.get_rank() != missing:
        message = refused(lambda: groups.disconnect(SHORT_S))
        assert f"rank {missing} of" in message, message
        assert not groups.is_down
        groups.reconnect(1, SHORT_S)  # which has nothing to undo
        assert not groups.is_down
    if step == 3:
        groups.disconnect(LIMIT_S)
        store = distributed.distributed_c10d._get_default_store()
        others = [f"refused/{rank}" for rank in range(distributed.get_world_size()) if rank != missing]
        if distributed.get_rank() != missing:
            message = refused(lambda: groups.reconnect(2, SHORT_S))
            assert f"rank {missing} of" in message, message
            assert groups.is_down
            store.set(f"refused/{distributed.get_rank()}", "yes")
        store.wait(others)
        groups.reconnect(3, LIMIT_S)


def one_rank_has_pending_work(step: int, groups: ProcessGroups) -> None:
    """A collective that one rank has started and the others have not reached is not cut off."""
    if step != 2:
        return
    rank = distributed.get_rank()
    ones = torch.ones(1)
    work = distributed.all_reduce(ones, async_op=True) if rank == 0 else None
    message = refused(lambda: groups.disconnect(LIMIT_S))
    assert "not finished" in message, message
    assert "rank 0" in message, message
    assert "gloo counts messages too" in message, message  # no later boundary helps a pipeline that is not watched
    assert not groups.is_down
    if work is None:
        distributed.all_reduce(ones)
    else:
        work.wait()
    assert int(ones) == distributed.get_world_size()


def main(folder: Path) -> None:
    reducer_buckets.watch(torch.nn.parallel.distributed)
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    ends = distributed.new_group([0, size - 1])
    pair = ends if rank in (0, size - 1) else None
    mesh = init_device_mesh("cpu", (size,))
    kinds: dict[str, Callable[[], Iterator[str]]] = {"ddp": lambda: ddp(pair)}
    if HAS_FSDP2:
        kinds["fsdp"] = lambda: fsdp(mesh)
    wanted = {name: run(begin(), lambda _step: None) for name, begin in kinds.items()}
    of_ddp = Disturber()
    betweens: list[tuple[str, Between]] = [("ddp", of_ddp)]
    betweens += [("fsdp", Disturber())] if HAS_FSDP2 else []
    betweens += [("ddp", partial(one_rank_is_missing, groups=ProcessGroups(), missing=size - 1))]
    betweens += [("ddp", partial(one_rank_has_pending_work, groups=ProcessGroups()))]
    for name, between in betweens:
        found = run(kinds[name](), between)
        assert found == wanted[name], (name, found, wanted[name])
    assert len(set(wanted["ddp"])) == STEPS
    assert of_ddp.buckets
    (folder / str(rank)).touch()
    distributed.barrier()
    os._exit(0)  # about one in six processes with gloo aborts while the interpreter ends (torch 2.13)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

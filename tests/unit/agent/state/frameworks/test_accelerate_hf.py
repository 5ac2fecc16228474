"""Loops of frameworks that are not known are a reason against a restart, never passed over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

from hegmd.agent.state.frameworks import accelerate_hf, lightning


def _frame_in(module: str, call: Callable[[], Any] | None = None) -> FrameType:
    names: dict[str, Any] = {"__name__": module, "call": call or (lambda: sys._getframe(1))}
    exec("def loop():\n    return call()", names)
    frame: FrameType = names["loop"]()
    return frame


def test_an_unrelated_script_is_ignored() -> None:
    assert accelerate_hf.against([_frame_in("__main__"), _frame_in("timm.models")]) is None
    taking = accelerate_hf.FrameworkCapture([_frame_in("__main__")])
    assert (taking.against, taking.read) == ([], None)


def test_lightning_gets_the_order_again_if_it_fetches_no_batch() -> None:
    for module in ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop"):
        ((what, hint, passes),) = accelerate_hf.against([_frame_in("__main__"), _frame_in(module)]) or []
        assert "Lightning" in what
        assert "try again" in hint
        assert passes


def test_the_training_loader_of_lightning_has_one_place_for_all_epochs() -> None:
    """Its pass begins above the epochs for the first of them, and within each later one."""
    script = ("__main__", "main", 40, 61)
    fit = ("lightning.pytorch.loops.fit_loop", "run", 175)
    first = lightning.path_of_pass((script, (*fit, 176), ("lightning.pytorch.loops.fit_loop", "setup_data", 190, 240)))
    later = lightning.path_of_pass((script, (*fit, 183), ("lightning.pytorch.loops.training_epoch_loop", "run", 1, 2)))
    held_out = (script, (*fit, 183), ("lightning.pytorch.loops.evaluation_loop", "run", 1, 2))
    assert first == later
    assert lightning.path_of_pass(held_out) == held_out


def test_frames_of_transformers_that_train_nothing_are_as_any_others() -> None:
    assert accelerate_hf.against([_frame_in("transformers.generation.utils")]) is None


def test_an_unknown_generator_of_accelerate_has_no_place() -> None:
    names: dict[str, Any] = {"__name__": "accelerate.data_loader"}
    exec("def __iter__(self):\n    yield 1", names)
    assert accelerate_hf.look_ahead(names["__iter__"](None)) == (None, 0)
    assert accelerate_hf.look_ahead(number for number in (1, 2)) is None


def test_batches_that_a_trainer_had_fetched_are_delivered_again() -> None:
    """The loader reads one batch ahead, and parks in the middle of those for one step of the optimizer."""

    class DataLoaderShard:
        end_of_dataloader = False

    loader: dict[str, Any] = {"__name__": "accelerate.data_loader"}
    exec("def batches(self, dataloader_iter):\n    yield 1\n    yield 2", loader)
    iterator = iter(())
    generator = loader["batches"](DataLoaderShard(), iterator)
    next(generator)
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=3),
        control=SimpleNamespace(should_save=False),
        callback_handler=SimpleNamespace(callbacks=[]),
    )
    script: dict[str, Any] = {"__name__": accelerate_hf.TRAINER, "frames": sys._getframe}
    exec(
        "def get_batch_samples(epoch_iterator, batch_samples):\n    return frames(1), frames(0)\n"
        "def _run_epoch(self, epoch, step, epoch_iterator, batch_samples):\n"
        "    return get_batch_samples(epoch_iterator, batch_samples)",
        script,
    )
    taking = accelerate_hf.FrameworkCapture([*script["_run_epoch"](trainer, 2, 7, generator, ["one", "other"])])
    assert taking.read == (iterator, 3)
    taken = taking.state["trainer"]
    assert (taken["epoch"], taken["batches"], taken["state"]) == (2, 8, {"global_step": 3})


def test_a_trainer_with_other_callbacks_is_not_restored() -> None:
    resuming = lightning.Resuming(lambda: None)
    assert resuming.misfits({"callbacks": []}) == ["Lightning's Trainer was not started"]
    resuming._trainer = SimpleNamespace(callbacks=[SimpleNamespace()])
    assert resuming.misfits({"callbacks": [("SimpleNamespace", {})]}) == []
    (why,) = resuming.misfits({"callbacks": [("Timer", {})]})
    assert why == "the Trainer has the callbacks SimpleNamespace and had Timer"

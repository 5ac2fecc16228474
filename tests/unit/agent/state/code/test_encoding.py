"""Values with a state of their own: which object is in the place of one after a restart."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.agent.state.code.encoding import SAME, Decoding, UnderWay, ValueEncoder
from tests.needs import need_torch


class Model:
    """Something that has a state of its own."""


def test_a_value_with_its_own_state_is_found_by_reference_or_stays() -> None:
    calls: list[Any] = []
    here, referred_to = Model(), Model()

    def find(reference: Any, _: Decoding) -> Model:
        calls.append(reference)
        return referred_to

    settling = Decoding(find)
    assert settling.settle((SAME, "Model", ("layers", 0)), here, "model") is referred_to
    assert settling.settle((SAME, "Model", None), here, "model") is here
    assert (calls, settling.missing) == ([("layers", 0)], [])


def test_a_value_of_another_type_is_missing() -> None:
    settling = Decoding(lambda _reference, _settling: None)
    here = Model()
    assert settling.settle((SAME, "Model", ("layers", 0)), here, "model") is here
    assert settling.missing == ["model (Model)"]


def test_communication_that_has_not_completed_is_not_saved() -> None:
    """Its tensors do not have their values yet."""
    torch = need_torch()
    done = torch.futures.Future()
    works = [torch._C._distributed_c10d._create_work_from_future(done)]
    with pytest.raises(UnderWay):
        ValueEncoder(lambda _value, _forms: None, {}).of(works)
    done.set_result([])
    form = ValueEncoder(lambda _value, _forms: None, {}).of(works)
    assert Decoding().settle(form, None, "works")[0].wait()


def test_communication_that_completed_while_it_was_looked_at_was_left_out_of_the_state() -> None:
    """The variable was missing after the restart, as one that no state can hold."""
    torch = need_torch()
    answers = iter((False, True))
    kind = type("Work", (torch._C._distributed_c10d.Work,), {"is_completed": lambda _self: next(answers)})
    with pytest.raises(UnderWay):
        ValueEncoder(lambda _value, _forms: None, {}).of(kind())

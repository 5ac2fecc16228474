"""Each form of a loop over `hegm.resumable` in HeGM's documents continues at its batch after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.restarted import LEFT_STATUS, Restarts
from tests.wide import telling

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("restarts")]

BEGINNING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
{imported}

torch.manual_seed(0)
data = TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(data, batch_size=2, shuffle={shuffled})


def train_on(step, inputs, targets):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), flush=True)

"""

BATCHES = """
for step, (inputs, targets) in {made}:
    train_on(step, inputs, targets)
"""

IN_A_FUNCTION = """
def main():
    for step, (inputs, targets) in hegm.resumable(loader):
        train_on(step, inputs, targets)


main()
"""

IN_EPOCHS = """
for epoch in range(hegm.start_epoch(), 3):
    for step, (inputs, targets) in {made}:
        train_on(step, inputs, targets)
"""

ABOVE_THE_LOOP = """
batches = hegm.resumable(loader)
for step, (inputs, targets) in batches:
    train_on(step, inputs, targets)
"""

OVER_LINES = """
for step, (inputs, targets) in hegm.resumable(
    loader,
    optimizer,
):
    train_on(step, inputs, targets)
"""

FORMS = {
    "top-level": ("import hegm", False, BATCHES.format(made="hegm.resumable(loader)")),
    "in-a-function": ("import hegm", False, IN_A_FUNCTION),
    "in-an-epochs-loop": ("import hegm", False, IN_EPOCHS.format(made="hegm.resumable(loader)")),
    "imported-by-its-name": ("from hegm import resumable", False, BATCHES.format(made="resumable(loader)")),
    "under-another-name": ("from hegm import resumable as goes_on", False, BATCHES.format(made="goes_on(loader)")),
    "shuffled": ("import hegm", True, IN_EPOCHS.format(made="hegm.resumable(loader)")),
    "replayed": ("import hegm", False, BATCHES.format(made="hegm.resumable(loader, replay=True)")),
    "with-the-optimizer": ("import hegm", False, BATCHES.format(made="hegm.resumable(loader, optimizer)")),
    "over-several-lines": ("import hegm", False, OVER_LINES),
    "above-the-loop": ("import hegm", False, ABOVE_THE_LOOP),
    "under-a-bar": (
        "import hegm\nfrom tqdm import tqdm",
        True,
        IN_EPOCHS.format(made="tqdm(hegm.resumable(loader), disable=True)"),
    ),
}
# The others go the same ways: `make test-wide` has them all.
ALONE = ("in-a-function", "imported-by-its-name", "shuffled", "replayed", "above-the-loop")


# The iterator of a pass that is over lives on: a collection of the garbage would free it.
WITH_WORKERS = """
import gc
gc.disable()
kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
made = kind.__init__


def __init__(self, loader):
    made(self, loader)
    self.itself = self


kind.__init__ = __init__
loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=1)
for epoch in range(4):
    for inputs, targets in loader:
        train_on(epoch, inputs, targets)
"""


@pytest.mark.parametrize("form", telling(((form,) for form in FORMS), [(form,) for form in ALONE]))
def test_a_loop_over_resumable_was_entered_differently(restarts: Restarts, tmp_path: Path, form: str) -> None:
    """Issue 14, row 6: no form came back; `enumerate` in its place did."""
    if form == "under-a-bar":
        pytest.importorskip("tqdm", reason="`pip install -e '.[frameworks]'` installs it")
    imported, shuffled, loops = FORMS[form]
    script = tmp_path / "train.py"
    script.write_text(BEGINNING.format(imported=imported, shuffled=shuffled) + loops)
    output, ends = restarts.restarted(str(script), at=(3, 4))
    assert [ended.status for ended in ends] == [LEFT_STATUS, LEFT_STATUS, 0], [ended.errors for ended in ends]
    assert output.splitlines() == restarts.undisturbed(str(script)).splitlines()


def test_a_finished_pass_with_workers_was_repeated_in_place_of_the_next(restarts: Restarts, tmp_path: Path) -> None:
    """An epoch was skipped, silently. A bar around the loader and a snapshot in the pass kept its iterator."""
    script = tmp_path / "train.py"
    script.write_text(BEGINNING.format(imported="", shuffled=True) + WITH_WORKERS)
    output, ends = restarts.restarted(str(script), at=(12, 12))
    assert [ended.status for ended in ends] == [LEFT_STATUS, LEFT_STATUS, 0], [ended.errors for ended in ends]
    assert output.splitlines() == restarts.undisturbed(str(script)).splitlines()

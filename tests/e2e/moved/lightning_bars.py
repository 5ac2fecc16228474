"""Lightning's Trainer with each of its progress bars, one after the other."""

import os
import sys
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 1)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        print("step", self.bar, index, loss.item().hex(), flush=True, file=STEPS)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


STEPS = os.fdopen(os.dup(1), "w")
sys.stdout = sys.stderr  # the bars are drawn beside the steps
warnings.simplefilter("ignore")
torch.set_num_threads(1)
lightning.seed_everything(6, verbose=False)
inputs = torch.randn(400, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
for bar in (RichProgressBar(refresh_rate=1), TQDMProgressBar(refresh_rate=1), None):
    model = Regression()
    model.bar = type(bar).__name__
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=[bar] if bar else None,
        enable_progress_bar=bool(bar),
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset, batch_size=4))

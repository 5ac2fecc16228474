"""Lightning's Trainer: a validation loop twice an epoch, a schedule by step, clipped gradients."""

import warnings

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 256),
            torch.nn.BatchNorm1d(256),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(256, 1),
        )

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        print("step", self.current_epoch, index, loss.item().hex(), flush=True)
        return loss

    def validation_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        print("step validation", index, loss.item().hex(), flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lightning.seed_everything(6, verbose=False)
    inputs = torch.randn(600, 64)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    validation = TensorDataset(inputs[:40], inputs[:40].sum(1, keepdim=True))
    model = Regression()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        gradient_clip_val=1.0,
        val_check_interval=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset, batch_size=6, shuffle=True), DataLoader(validation, batch_size=20))
    trainer.save_checkpoint("last.ckpt")
    print("step end", [parameter.double().sum().item().hex() for parameter in model.parameters()], flush=True)


if __name__ == "__main__":
    main()

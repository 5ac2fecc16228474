"""Lightning with all that counts beside the loops: checkpoints, early stopping, a plateau, means of an epoch, a bar."""

import io
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

told = sys.stdout
sys.stdout = io.StringIO()  # where the bars go


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
        self.seen = 0

    def training_step(self, batch, index):
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean()
        self.seen += len(batch[0])
        self.log("loss", loss, prog_bar=True)
        rate = self.optimizers().param_groups[0]["lr"]
        print(
            "step",
            self.current_epoch,
            index,
            self.global_step,
            self.seen,
            rate,
            loss.item().hex(),
            file=told,
            flush=True,
        )
        return loss

    def validation_step(self, batch, _index):
        self.log("held_out", (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "held_out"}}


class Teller(Callback):
    def __init__(self):
        self.epochs = []

    def on_train_epoch_start(self, trainer, _module):
        self.epochs.append(trainer.current_epoch)
        print("epoch", *self.epochs, file=told, flush=True)

    def on_validation_end(self, trainer, _module):
        print("held out", trainer.global_step, trainer.callback_metrics["held_out"].item().hex(), file=told, flush=True)

    def on_train_epoch_end(self, trainer, _module):
        bar = trainer.progress_bar_callback.train_progress_bar
        print("bar", bar.n, bar.total, bar.desc, trainer.callback_metrics["loss"].item().hex(), file=told, flush=True)


def main():
    warnings.simplefilter("ignore")
    lightning.seed_everything(6, verbose=False)
    inputs = torch.randn(44, 8)
    folder = Path(sys.argv[1])
    kept = ModelCheckpoint(folder / "kept", monitor="held_out", save_top_k=2, filename="{epoch}-{step}", save_last=True)
    stopping = EarlyStopping("held_out", patience=2)
    monitor = LearningRateMonitor()
    trainer = lightning.Trainer(
        max_epochs=6,
        accelerator="cpu",
        accumulate_grad_batches=2,
        val_check_interval=5,
        log_every_n_steps=1,
        logger=CSVLogger(folder / "logs"),
        callbacks=[kept, stopping, monitor, Teller(), TQDMProgressBar()],
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True), DataLoader(inputs[:8, None]))
    print(
        "stopped",
        trainer.current_epoch,
        trainer.global_step,
        stopping.wait_count,
        stopping.best_score.item().hex(),
        file=told,
    )
    best = sorted((Path(path).name, score.item().hex()) for path, score in kept.best_k_models.items())
    print("kept", *best, sorted(path.name for path in (folder / "kept").iterdir()), len(monitor.lrs), file=told)


if __name__ == "__main__":
    main()

"""The Trainer of Hugging Face on a small GPT-2: accumulation, warm-up, its own log."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Telling(Trainer):
    def training_step(self, model, inputs, *arguments, **named):
        loss = super().training_step(model, inputs, *arguments, **named)
        rate = self.lr_scheduler.get_last_lr()[0]
        content = inputs["input_ids"].double().pow(2).sum().item()
        print("batch", content.hex(), rate.hex(), loss.item().hex(), self.state.global_step, flush=True)
        return loss


torch.set_num_threads(1)
set_seed(7)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (240, 12))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        warmup_steps=10,
        learning_rate=1e-3,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    Telling(model, arguments, train_dataset=data).train()

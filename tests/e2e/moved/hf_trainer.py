"""The Trainer of Hugging Face on a small GPT-2: accumulation, warm-up, evaluations between the steps of an epoch."""

import hashlib
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Tell(TrainerCallback):
    def on_log(self, _args, state, control, logs=None, **_kwargs):
        values = [
            f"{name}={logs[name]!r}" for name in ("loss", "grad_norm", "learning_rate", "eval_loss") if name in logs
        ]
        print("step", state.global_step, *values, flush=True)


def sentences(count):
    tokens = torch.randint(0, 64, (count, 24))
    return [{"input_ids": row, "labels": row} for row in tokens]


def main():
    torch.set_num_threads(1)
    set_seed(5)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=5,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            warmup_steps=10,
            learning_rate=1e-3,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=sentences(320), eval_dataset=sentences(32), callbacks=[Tell])
        trainer.train()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print("step end", digest.hexdigest(), flush=True)
    model.save_pretrained("trained")


if __name__ == "__main__":
    main()

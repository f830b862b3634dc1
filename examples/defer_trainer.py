"""transformers.Trainer with one callback more: `python examples/defer_trainer.py`, on a CPU.

A small Llama with a real vocabulary and random weights, bf16, accumulated gradients, evaluation
with metrics. Needs transformers and accelerate.
"""

import tempfile

import torch
import transformers

import lowtide
from lowtide.integrations.transformers import TransformersDeferralCallback

TOKENS, CLASSES = 64, 32000


class Data(torch.utils.data.Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(100, (count, TOKENS), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, item):
        return {"input_ids": self.tokens[item], "labels": self.tokens[item]}


def accuracy(found):
    right = found.predictions[:, :-1] == found.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


def train(callbacks, folder):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=CLASSES,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        bf16=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
    )
    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Data(32),
        eval_dataset=Data(4),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    with lowtide.peak_memory("cpu") as peak:
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[-1], trainer.evaluate()["eval_accuracy"], peak.bytes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, callbacks in (("as it is", []), ("deferred", [TransformersDeferralCallback()])):
            loss, right, peak = train(callbacks, folder)
            print(f"{name}: loss {loss:.5f}, accuracy {right:.3f}, peak memory {peak / 2**20:.0f} MiB")

"""trl.SFTTrainer with one callback more: `python examples/trl_sft.py`, on a CPU.

A small Llama with a real vocabulary and random weights, on made up sentences. Needs trl.
"""

import random
import tempfile
import warnings

import datasets
import tokenizers
import torch
import transformers
import trl

from lowtide.bench.memory import peak_memory
from lowtide.integrations.trl import DeferLogits

TOKENS, CLASSES = 512, 32000


def tokenizer():
    names = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(CLASSES - 3))]
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: place for place, name in enumerate(names)}, "<pad>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def text(count):
    return " ".join(f"w{random.randrange(100)}" for _ in range(count))


def model():
    config = transformers.LlamaConfig(
        vocab_size=CLASSES,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def train(callbacks, folder):
    torch.manual_seed(0)
    random.seed(0)
    data = datasets.Dataset.from_dict({"text": [text(TOKENS - 2) for _ in range(8)]})
    arguments = trl.SFTConfig(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=4,
        optim="sgd",
        learning_rate=0.1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        bf16=False,
        max_length=TOKENS,
    )
    trainer = trl.SFTTrainer(
        model=model(), args=arguments, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks
    )
    trainer.remove_callback(transformers.PrinterCallback)
    with peak_memory("cpu") as peak:
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[-1], peak.bytes


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        for name, callbacks in (("as it is", []), ("deferred", [DeferLogits()])):
            loss, peak = train(callbacks, folder)
            print(f"{name}: loss {loss:.5f}, peak memory {peak / 2**20:.0f} MiB")

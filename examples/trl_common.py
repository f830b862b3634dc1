"""What the three examples of TRL share: a small Llama with a real vocabulary and random weights, a
tokenizer of made up words, and the run as it is and deferred."""

import random
import tempfile
import warnings

import datasets
import tokenizers
import torch
import transformers

import lowtide

CLASSES = 32000
OPTIONS = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "optim": "sgd",
    "learning_rate": 0.1,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
    "bf16": False,
}


def tokenizer():
    names = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(CLASSES - 3))]
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: place for place, name in enumerate(names)}, "<pad>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def texts(count, words):
    return [" ".join(f"w{random.randrange(100)}" for _ in range(words)) for _ in range(count)]


def model():
    config = transformers.LlamaConfig(
        vocab_size=CLASSES,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def compare(trainer):
    """`trainer(deferred, folder)` trains twice: the last step's loss, and the run's peak memory."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for name, deferred in (("as it is", False), ("deferred", True)):
        torch.manual_seed(0)
        random.seed(0)
        with tempfile.TemporaryDirectory() as folder:
            one = trainer(deferred, folder)
            one.remove_callback(transformers.PrinterCallback)
            with lowtide.peak_memory("cpu") as peak:
                one.train()
        losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        print(f"{name}: loss {losses[-1]:.5f}, peak memory {peak.bytes / 2**20:.0f} MiB")

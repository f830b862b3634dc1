"""trl.SFTTrainer with one callback more: `python examples/trl_sft.py`, on a CPU. Needs trl."""

import datasets
import trl
from trl_common import OPTIONS, compare, model, texts, tokenizer

from lowtide.integrations.trl import TRLDeferralCallback

TOKENS = 128


def trainer(deferred, folder):
    return trl.SFTTrainer(
        model=model(),
        args=trl.SFTConfig(output_dir=folder, max_length=TOKENS, **OPTIONS),
        train_dataset=datasets.Dataset.from_dict({"text": texts(8, TOKENS - 2)}),
        processing_class=tokenizer(),
        callbacks=[TRLDeferralCallback()] if deferred else [],
    )


if __name__ == "__main__":
    compare(trainer)

"""trl.DPOTrainer with one callback more: `python examples/trl_dpo.py`, on a CPU. Needs trl."""

import copy

import datasets
import trl
from trl_common import OPTIONS, compare, model, texts, tokenizer

from lowtide.integrations.trl import TRLDeferralCallback

TOKENS = 64


def trainer(deferred, folder):
    answers = {name: texts(8, TOKENS - 10) for name in ("chosen", "rejected")}
    questions = [each + " " for each in texts(8, 8)]
    policy = model()
    reference = copy.deepcopy(policy)
    return trl.DPOTrainer(
        model=policy,
        ref_model=reference,
        args=trl.DPOConfig(output_dir=folder, max_length=TOKENS, **OPTIONS),
        train_dataset=datasets.Dataset.from_dict({"prompt": questions, **answers}),
        processing_class=tokenizer(),
        callbacks=[TRLDeferralCallback(reference)] if deferred else [],
    )


if __name__ == "__main__":
    compare(trainer)

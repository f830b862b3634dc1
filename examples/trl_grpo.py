"""trl.GRPOTrainer with one callback more: `python examples/trl_grpo.py`, on a CPU. Needs trl.

The log-probabilities of the completions, and their entropy, come from lowtide.linear_log_probs.
Small numbers are rewarded.
"""

import datasets
import trl
from trl_common import CLASSES, OPTIONS, compare, model, texts, tokenizer

from lowtide.integrations.trl import TRLDeferralCallback

TOKENS = 64


def small_numbers(completions, completion_ids, **_):
    return [-sum(ids) / CLASSES / len(ids) for ids in completion_ids]


def trainer(deferred, folder):
    arguments = trl.GRPOConfig(
        output_dir=folder,
        num_generations=4,
        max_completion_length=TOKENS,
        temperature=0.8,
        num_iterations=2,  # in the first, every advantage has the weight 1, and they add up to 0
        **OPTIONS,
    )
    return trl.GRPOTrainer(
        model=model(),
        reward_funcs=small_numbers,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": texts(8, 8)}),
        processing_class=tokenizer(),
        callbacks=[TRLDeferralCallback()] if deferred else [],
    )


if __name__ == "__main__":
    compare(trainer)

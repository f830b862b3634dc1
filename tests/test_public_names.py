import inspect

import pytest

import lowtide


def test_names():
    expected = {
        "LinearCrossEntropyLoss",
        "LogProbs",
        "attn_bias",
        "chunked_loss",
        "defer_logits",
        "distillation",
        "linear_cross_entropy",
        "linear_log_probs",
        "losses",
        "memory_efficient_attention",
        "memory_efficient_attention_with_lse",
        "merge_attentions",
        "peak_memory",
        "scaled_dot_product_attention",
        "shard_head",
        "tokens_per_rank",
        "warmup",
    }
    assert expected == set(lowtide.__all__)
    assert lowtide.__all__ == sorted(lowtide.__all__)
    assert all(hasattr(lowtide, name) for name in lowtide.__all__)
    assert callable(lowtide.linear_cross_entropy)
    assert lowtide.__version__.count(".") == 2


HEAD = {"linear_bias": None, "softcap": None, "logit_scale": None, "workspace": None, "backend": "auto"}
LOSS = {"reduction": "mean", "ignore_index": None, "label_smoothing": 0.0, "z_loss": 0.0, "weight": None}
RANKS = {"tokens_sharded": False, "segments": None}
SHARD = {"group": None, "first_class": None, "num_classes": None} | RANKS
ROWS = {"row_weight": None, "normalizer": None}  # arguments of the call of the module
MODULE = {"out_features": (), "bias": False, "device": None, "dtype": None}


@pytest.mark.parametrize(
    ("function", "arguments", "options"),
    [
        (lowtide.linear_cross_entropy, ["input", "linear_weight", "target"], HEAD | LOSS | ROWS | SHARD),
        (
            lowtide.linear_log_probs,
            ["input", "linear_weight", "target"],
            HEAD | {"ignore_index": -100} | SHARD,
        ),
        (
            lowtide.LinearCrossEntropyLoss,
            ["in_features", "num_classes"],
            {
                name: default
                for name, default in (HEAD | LOSS | MODULE | RANKS).items()
                if name != "linear_bias"
            },
        ),
    ],
)
def test_signatures(function, arguments, options):
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == arguments
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == options


def test_log_probs_is_a_named_tuple():
    assert lowtide.LogProbs._fields == ("log_prob", "entropy", "logsumexp", "argmax")


ELSEWHERE = {"LogProbs", "defer_logits"}  # a tuple's fields; and what is explained by a page of its own


def documented():
    names = [name for name in lowtide.__all__ if callable(getattr(lowtide, name)) and name not in ELSEWHERE]
    functions = [getattr(lowtide, name) for name in names]
    for module in (lowtide.losses, lowtide.distillation):
        functions += [getattr(module, name) for name in module.__all__]
    return functions


@pytest.mark.parametrize("function", documented(), ids=lambda function: function.__name__)
def test_help_shows_an_example_first(function):
    """After the summary, before formulas, shapes and arguments."""
    summary, example, *_ = inspect.getdoc(function).split("\n\n")
    assert summary.split()[0] != "Example::"
    assert example == "Example::"

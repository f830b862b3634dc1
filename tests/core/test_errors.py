"""The error about an argument of another library says which one lowtide has for it."""

import inspect
import re

import pytest
import torch

import lowtide
from lowtide.core.errors import advises_on_names
from lowtide.ops.attention import api as attention
from lowtide.ops.linear_cross_entropy.definition import advice
from tests.support.graphs import needs_tracing

TABLES = (
    (lowtide.linear_cross_entropy, advice.INSTEAD_OF),
    (lowtide.linear_log_probs, {}),
    (lowtide.memory_efficient_attention, attention.INSTEAD_OF),
    (lowtide.memory_efficient_attention_with_lse, attention.INSTEAD_OF),
    (lowtide.scaled_dot_product_attention, attention.INSTEAD_OF_IN_TORCH),
)
# The arguments of Liger 0.8.5's function and module, of Cut Cross-Entropy 25.1.1 and torch 2.13's function.
LIGER = ("bias", "ce_weight", "lse_square_scale", "return_z_loss", "accum_dtype", "use_token_scaling")
LIGER += ("return_token_accuracy", "return_predicted_tokens", "lin_weight", "_input")
OTHERS = (
    "e",
    "c",
    "targets",
    "shift",
    "filter_eps",
    "impl",
    "accum_e_fp32",
    "vocab_parallel_options",
    "options",
)


@pytest.mark.parametrize(("function", "instead"), TABLES, ids=lambda each: getattr(each, "__name__", ""))
def test_advice_names_an_argument(function, instead):
    known = inspect.signature(function).parameters
    assert not known.keys() & instead.keys()
    for sentence in instead.values():
        passed = re.match(r"pass (\w+)", sentence)
        if passed and passed[1] != "nothing":
            assert passed[1] in known, sentence


@pytest.mark.parametrize("name", [*LIGER, *OTHERS])
def test_names_of_peers(name):
    x, w, y = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    with pytest.raises(TypeError, match=f"keyword argument '{name}'; for {name} ") as caught:
        lowtide.linear_cross_entropy(x, w, y, **{name: None})
    assert isinstance(caught.value, RuntimeError)
    assert advice.INSTEAD_OF[name] in str(caught.value)


def test_several_names_at_once():
    x, w, y = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    with pytest.raises(
        TypeError, match="for _input pass input, for lin_weight pass linear_weight, for label pass target"
    ):
        lowtide.linear_cross_entropy(_input=x, lin_weight=w, label=y)


def test_module_and_misspelt_name():
    with pytest.raises(TypeError, match="for lse_square_scale pass z_loss"):
        lowtide.LinearCrossEntropyLoss(4, 5, lse_square_scale=1e-4)
    with pytest.raises(TypeError, match="for label_smooting pass label_smoothing"):
        lowtide.LinearCrossEntropyLoss(4, 5, label_smooting=0.1)


def test_attention_in_the_words_of_torch():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(TypeError, match=r"for is_causal pass attn_bias=.*LowerTriangularMask\(\)"):
        lowtide.memory_efficient_attention(q, q, q, is_causal=True)
    with pytest.raises(TypeError, match="for p pass dropout_p"):
        lowtide.scaled_dot_product_attention(q, q, q, p=0.1)


def test_unknown_name_keeps_the_error_of_python():
    @advises_on_names({})
    def function(first, second=None):
        return first

    assert function(1, second=2) == function.__wrapped__(1) == 1
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$") as caught:
        function(1, zzz=2)
    assert not isinstance(caught.value, RuntimeError)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        function()


@needs_tracing
def test_compiled_call_has_no_break():
    x, w, y = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    compiled = torch.compile(lowtide.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(x, w, y, softcap=2.0), lowtide.linear_cross_entropy(x, w, y, softcap=2.0)
    )

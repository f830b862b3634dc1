"""The error about an argument of another library says which one lowtide has for it."""

import inspect
import re

import pytest
import torch

import lowtide
from lowtide.core.errors import advises
from lowtide.ops.attention import api as attention
from lowtide.ops.chunked_loss import api as chunked_loss
from lowtide.ops.distillation import api as distillation
from lowtide.ops.linear_cross_entropy.definition import advice
from tests.support.graphs import needs_tracing

TABLES = (
    (lowtide.linear_cross_entropy, advice.INSTEAD_OF),
    (lowtide.linear_log_probs, advice.INSTEAD_OF_IN_LOG_PROBS),
    (lowtide.memory_efficient_attention, attention.INSTEAD_OF),
    (lowtide.memory_efficient_attention_with_lse, attention.INSTEAD_OF),
    (lowtide.scaled_dot_product_attention, attention.INSTEAD_OF_IN_TORCH),
    (lowtide.LinearCrossEntropyLoss.forward, advice.INSTEAD_OF_IN_FORWARD),
    (lowtide.chunked_loss, chunked_loss.INSTEAD_OF),
    (lowtide.distillation.forward_kl, distillation.INSTEAD_OF),
    (lowtide.distillation.jensen_shannon, {"jsd_beta": "pass beta"}),
)
# The arguments of Liger 0.8.5's function and module, of Cut Cross-Entropy 25.1.1 and its main
# branch, and of torch 2.13's function.
LIGER = ("bias", "ce_weight", "lse_square_scale", "return_z_loss", "accum_dtype", "use_token_scaling")
LIGER += ("chunk_mem_const", "return_token_accuracy", "return_predicted_tokens", "lin_weight", "_input")
OTHERS = (
    "e",
    "c",
    "targets",
    "shift",
    "filter_eps",
    "filter_e_grad",
    "filter_c_grad",
    "impl",
    "accum_e_fp32",
    "accum_c_fp32",
    "return_lse",
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


def test_divergence_in_the_words_of_the_loss():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    for name, advised in {
        "row_weight": 'pass reduction="none", and weigh',
        "weight": "pass student_weight and teacher_weight",
        "mask": "pass ignored",
        "linear_bias": "pass student_bias and teacher_bias",
    }.items():
        with pytest.raises(TypeError, match=f"for {name} {advised}"):
            lowtide.distillation.forward_kl(x, w, x, w, **{name: None})


def test_log_probs_in_the_words_of_the_loss():
    x, w, y = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    with pytest.raises(TypeError, match="for reduction weigh and sum the log_prob"):
        lowtide.linear_log_probs(x, w, y, reduction="mean")
    for function in (lowtide.linear_log_probs, lowtide.linear_cross_entropy):
        with pytest.raises(
            TypeError, match=r"for mask set target to ignore_index \(-100\) where the mask is 0"
        ):
            function(x, w, y, mask=y > 0)
    with pytest.raises(TypeError, match=r"for z_loss call lowtide\.linear_cross_entropy, which has it"):
        lowtide.linear_log_probs(x, w, y, z_loss=1e-4)


def test_attention_in_the_words_of_torch():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(TypeError, match=r"for is_causal pass attn_bias=.*LowerTriangularMask\(\)"):
        lowtide.memory_efficient_attention(q, q, q, is_causal=True)
    with pytest.raises(TypeError, match="for p pass dropout_p"):
        lowtide.scaled_dot_product_attention(q, q, q, p=0.1)


def test_unknown_name_shows_the_known_ones():
    @advises({}, "pass (first)")
    def function(first, second=None):
        return first

    assert function(1, second=2) == function.__wrapped__(1) == 1
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument 'zzz'; for zzz pass one of first, second$"
    ) as caught:
        function(1, zzz=2)
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'first'; pass \(first\)$"):
        function()
    with pytest.raises(TypeError, match=r"takes from 1 to 2 positional .* 3 were given; pass \(first\)$"):
        function(1, 2, 3)


def test_unknown_name_has_the_advice_of_its_function():
    @advises({"b": "pass first"}, "pass (first)", otherwise="pass {known} or bind({unknown})")
    def function(first, *others):
        return first

    advised = (
        r"for b pass first, for frst pass first, for zzz and others pass first or bind\(zzz=.*, others=.*\)$"
    )
    with pytest.raises(TypeError, match=f"'zzz'; {advised}"):
        function(1, zzz=2, b=3, frst=4, others=5)


def test_error_of_the_function_itself_is_left_alone():
    """A TypeError from inside a call that fits is not taken for one of its arguments."""

    @advises({}, "pass (first)")
    def function(first, *others):
        raise TypeError("from inside")

    with pytest.raises(TypeError, match=r"^from inside$"):
        function(1, 2, 3)


x, w, y, logits = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2]), torch.randn(3, 5)
head, q = torch.nn.Linear(4, 5), torch.randn(1, 4, 2, 8)
module = lowtide.LinearCrossEntropyLoss
PLACES = {
    # the call as it is in Liger, Cut Cross-Entropy, xformers or torch, and what its error says
    "Liger's module": (lambda: module(ignore_index=-100), "'in_features' and 'num_classes'; it makes a head"),
    "Liger's module, ready": (lambda: module(None, -100, 1e-4), r"call lowtide\.linear_cross_entropy\(input"),
    "Liger's call": (lambda: module(4, 5)(w, x, y), r"but 4 were given; pass \(input, target\): the weight"),
    "Liger's call by name": (
        lambda: module(4, 5)(lin_weight=w, _input=x, target=y),
        r"for lin_weight set \.linear\.weight, or call lowtide.*, for _input pass input",
    ),
    "Liger's function": (lambda: lowtide.linear_cross_entropy(x, w, y, head.bias), r"as linear_bias=\.\.\.$"),
    "logits": (lambda: lowtide.linear_cross_entropy(logits, y), r"missing 1 .*; pass \(input, linear_weight"),
    "logits to log-probabilities": (lambda: lowtide.linear_log_probs(logits, y), "; pass .input, linear_wei"),
    "a layer": (
        lambda: lowtide.linear_cross_entropy(x, head, y),
        r"got Linear; pass its \.weight, and its \.bias as linear_bias$",
    ),
    "a layer, log-probabilities": (
        lambda: lowtide.linear_log_probs(x, head, y),
        r"Linear; pass its \.weight, and its \.bias as linear_bias$",
    ),
    "Liger's Jensen-Shannon": (
        lambda: lowtide.distillation.jensen_shannon(x, w, x, w, y),
        "5 were given; .* ignored=labels == -100$",
    ),
    "xformers' op": (
        lambda: lowtide.memory_efficient_attention(q, q, q, None, 0.0, None, None),
        r"7 were given; pass \(query, key, value, attn_bias, p, scale\) in this order, and the rest by name$",
    ),
    "xformers' merge": (
        lambda: lowtide.merge_attentions([q, q], [q[..., 0], q[..., 0]]),
        r"pass one list of pairs \(out, logsumexp\)$",
    ),
    "head before loss_fn": (
        lambda: lowtide.chunked_loss(head, torch.nn.functional.cross_entropy, x, y),
        r"got Linear; pass \(loss_fn, head, hidden, \.\.\.\) in this order$",
    ),
}


@pytest.mark.parametrize("call", PLACES)
def test_places_of_peers(call):
    run, message = PLACES[call]
    with pytest.raises(TypeError, match=message) as caught:
        run()
    assert isinstance(caught.value, RuntimeError)


def test_soft_cap_of_a_config_is_not_taken_for_a_scale():
    with pytest.raises(TypeError, match="for logit_softcapping pass softcap"):
        lowtide.linear_cross_entropy(x, w, y, logit_softcapping=30.0)


def test_argument_of_another_loss():
    with pytest.raises(
        TypeError, match=r"for gamma pass one of input, .*softcap.*; lowtide\.chunked_loss takes any loss$"
    ) as caught:
        lowtide.linear_cross_entropy(x, w, y, gamma=2.0)
    assert isinstance(caught.value, RuntimeError)


def test_argument_of_the_callers_own_loss():
    def focal(logits, labels, gamma=1.0):
        return logits.sum() * gamma

    advised = (
        r"for gamma and alpha pass tensors with the rows of hidden by place, after hidden, and what else "
        r"loss_fn takes by functools\.partial\(loss_fn, gamma=\.\.\., alpha=\.\.\.\)$"
    )
    for call in (lowtide.chunked_loss, lowtide.chunked_loss(chunk_size=2)(focal)):
        with pytest.raises(TypeError, match=advised) as caught:
            call(*([focal] if call is lowtide.chunked_loss else []), head, x, y, gamma=2.0, alpha=1.0)
        assert isinstance(caught.value, RuntimeError)


@needs_tracing
def test_compiled_call_has_no_break():
    x, w, y = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    compiled = torch.compile(lowtide.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(x, w, y, softcap=2.0), lowtide.linear_cross_entropy(x, w, y, softcap=2.0)
    )

"""Products of deferred logits: once for all operations that share them, and for blocks of rows.

Shapes: B sequences, T tokens, V classes.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

import lowtide
from lowtide.deferred.recorded import chunks, expression
from tests.deferred.helpers import B, T, V, differentiated, make
from tests.ops.chunked_loss.helpers import close


def sharing(z):
    """Two sums over the classes that no operator has."""
    log_p = z.log_softmax(-1)
    return -(log_p.exp() * log_p.tanh()).sum(-1) + z.tanh().sum(-1)


@pytest.fixture
def products(monkeypatch):
    """The rows of each product."""
    rows = []

    def noted(linear, of=expression.product):
        rows.append(linear.input.tensor.shape[0])
        return of(linear)

    monkeypatch.setattr(expression, "product", noted)
    return rows


@pytest.mark.parametrize("rows", [B * T, 8])
def test_shared_product_once_for_a_block(products, monkeypatch, rows):
    """One in forward and one in backward for each block, in which chunks have 4 rows."""
    monkeypatch.setattr(chunks, "_sizes", lambda *_: (rows, 4))
    model, tokens, _ = make(bias=True)
    expected = differentiated(model, sharing(model(tokens)[0]))
    with lowtide.defer_logits(model) as deferral:
        found = differentiated(model, sharing(model(tokens)[0] * 1.5 / 1.5))
    close(found, expected)
    assert deferral.materialized == {}
    blocks = [min(rows, B * T - start) for start in range(0, B * T, rows)]
    assert products == blocks * 4  # two sums over classes, forward and backward


@pytest.mark.parametrize("workspace", [2**14, 2**15, 2**16, None])
def test_sizes_fit_in_the_workspace(workspace):
    model, tokens, _ = make(bias=True)
    with lowtide.defer_logits(model):
        node = (model(tokens)[0] * 2).softmax(-1).node
    for N in (1, 20, 1000):
        block, chunk = chunks._sizes(node, N, 3, node.dtype, workspace)
        # a product and its gradient; two operations, three numbers of the function, a gradient
        held = block * 2 * V * 8 + chunk * (2 + 3 + 1) * V * 8
        assert 1 <= block <= N
        assert chunk >= 1
        assert held <= (workspace or chunks.ROOM["cpu"])
        assert block == N or held > 0.45 * workspace  # half for each


@pytest.mark.parametrize("classes", [600, 32000, 50257, 128256])
@pytest.mark.parametrize("workspace", [2**24, 2**26, 2**26 + 2**25, None])
def test_cast_changes_no_block(classes, workspace):
    """So a value that has been picked from the cast logits is among them when they are real."""
    head = nn.Linear(1, classes, dtype=torch.bfloat16)
    with lowtide.defer_logits(head, head=head):
        logits = head(torch.zeros(1, 1, dtype=torch.bfloat16))
        nodes = logits.node, logits.float().node, (logits.float() / 0.7).node
    blocks = {chunks._sizes(node, 100_000, 1, torch.bfloat16, workspace)[0] for node in nodes}
    assert len(blocks) == 1


def test_deep_expression_of_shared_operations():
    """A product with itself, 40 times over, has 2^40 paths and 41 nodes."""
    model, tokens, _ = make()

    def use(z):
        for _ in range(40):
            z = (z + z) * 0.5
        return z.logsumexp(-1) + z.tanh().sum(-1)

    expected = differentiated(model, use(model(tokens)[0]))
    with lowtide.defer_logits(model) as deferral:
        close(differentiated(model, use(model(tokens)[0])), expected)
    assert deferral.materialized == {}


@pytest.mark.parametrize("end", ["backward", "second order", "neither"])
def test_hidden_states_are_freed(end):
    """Backward frees them, or the end of the results does; Python need not look for cycles."""
    model, tokens, _ = make(bias=True)
    gc.collect()
    gc.disable()
    try:
        with lowtide.defer_logits(model):
            logits = model(tokens)[0]
            hidden = weakref.ref(expression.hidden(logits.node))
            result = sharing(logits * 1.5 + torch.ones(V))
            del logits
            if end == "second order":
                first = torch.autograd.grad(result.sum(), model.lm_head.weight, create_graph=True)[0]
                first.square().sum().backward()
                del first, result
            elif end == "backward":
                result.sum().backward()
            else:
                del result
            assert hidden() is None
    finally:
        gc.enable()

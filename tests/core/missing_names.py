"""The calls of test_torch_private.py, in processes where private functions of torch are missing.

    python -m tests.core.missing_names A,B C

Each argument names what is missing at once. A process is forked for it behind the imports that take
long, and prints one JSON object: the names, and the traceback of an error or None.
"""

import json
import os
import sys
import traceback

import torch
import torch._dynamo  # import now what calls would import later, including DTensor
import torch.nn.functional as F


def import_without(names):
    """Import lowtide while these names are missing. torch needs them itself, so they come back."""
    kept = []
    for path in names:
        *owners, name = path.split(".")
        owner = torch
        for each in owners:
            owner = getattr(owner, each)
        kept.append((owner, name, getattr(owner, name)))
        delattr(owner, name)
    import lowtide

    for owner, name, value in kept:
        setattr(owner, name, value)
    return lowtide


def same(found, truth, *tensors, again=True):
    torch.testing.assert_close(found, truth)
    for retain in (True, False) if again else (False,):
        ours = torch.autograd.grad(3 * found.sum(), tensors, retain_graph=retain)
        torch.testing.assert_close(ours, torch.autograd.grad(3 * truth.sum(), tensors, retain_graph=retain))


def loss_fn(z, y):
    return F.cross_entropy(z, y, reduction="sum")


def check(lowtide):
    torch.manual_seed(0)
    x, w = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (12, 20))
    target = torch.randint(20, (12,))

    logits = x @ w.t()
    for reduction in ("mean", "none"):
        loss = lowtide.linear_cross_entropy(x, w, target, reduction=reduction)
        same(loss, F.cross_entropy(logits, target, reduction=reduction), x, w)
        logits = x @ w.t()
    found = lowtide.linear_log_probs(x, w, target)
    same(found.log_prob, logits.log_softmax(-1).gather(1, target[:, None])[:, 0], x, w)

    head = torch.nn.Linear(8, 20, bias=False, dtype=torch.float64)
    head.weight = torch.nn.Parameter(w.detach().clone())
    for mode in ("gradient_in_forward", "recompute"):
        loss = lowtide.chunked_loss(loss_fn, head, x, target, chunk_size=5, mode=mode)
        same(loss, F.cross_entropy(F.linear(x, head.weight), target, reduction="sum"), x, head.weight)
    q, k, v = (torch.randn(2, 7, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    found = lowtide.memory_efficient_attention(q, k, v)
    truth = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)
    same(found, truth, q, k, v)
    found = lowtide.memory_efficient_attention(q, k, v, backend="torch")
    truth = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)
    same(found, truth, q, k, v)
    with lowtide.defer_logits(head, head=head):
        loss = F.cross_entropy(head(x), target)
    same(loss, F.cross_entropy(F.linear(x, head.weight), target), x, head.weight)
    once = torch.autograd.grad(lowtide.linear_cross_entropy(x, w, target), x, create_graph=True)[0]
    exact = torch.autograd.grad(F.cross_entropy(x @ w.t(), target), x, create_graph=True)[0]
    same(once.square(), exact.square(), x, w, again=False)
    try:
        found = torch.func.grad(lambda x: lowtide.linear_cross_entropy(x, w, target))(x)
        torch.testing.assert_close(found, torch.autograd.grad(F.cross_entropy(x @ w.t(), target), x)[0])
    except RuntimeError as refusal:
        if "upgrade lowtide" not in str(refusal):  # the message must say what to do
            raise


for argument in sys.argv[1:]:
    assert "lowtide" not in sys.modules
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    error = None
    try:
        check(import_without(argument.split(",")))
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps({"names": argument, "error": error}), flush=True)
    os._exit(0)

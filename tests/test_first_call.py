"""The first call in a process, forward and backward, imports no Dynamo, which takes 2 to 3 s."""

import subprocess
import sys

from tests.support.graphs import needs_tracing

PROGRAM = """
import functools, sys, warnings
import torch
import torch.nn.functional as F
import lowtide

warnings.simplefilter("ignore")  # that logits are made real

def leaf(*shape):
    return torch.randn(shape).requires_grad_()

x, w, target = leaf(7, 5), leaf(33, 5), torch.randint(33, (7,))
query, bias = leaf(1, 4, 2, 8), leaf(1, 2, 4, 4)
teacher = x.detach(), w.detach()
head, cross_entropy = torch.nn.Linear(5, 33), functools.partial(F.cross_entropy, reduction="sum")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(5, 33, bias=False)
    def get_output_embeddings(self):
        return self.lm_head
    def forward(self, x):
        return self.lm_head(x)

model, vector = Model(), leaf(33)
lowtide.defer_logits(model)
several = target[:, None].expand(7, 2)
calls = {
    "linear_cross_entropy": lambda: lowtide.linear_cross_entropy(x, w, target),
    "none": lambda: lowtide.linear_cross_entropy(x, w, target, reduction="none"),
    "probabilities": lambda: lowtide.linear_cross_entropy(x, w, torch.ones(7, 33) / 33),
    "positions": lambda: lowtide.linear_cross_entropy(x, w.expand(2, 33, 5).transpose(0, 1), several),
    "LinearCrossEntropyLoss": lambda: lowtide.LinearCrossEntropyLoss(5, 33)(x, target),
    "linear_log_probs": lambda: lowtide.linear_log_probs(x, w, target).log_prob,
    "memory_efficient_attention": lambda: lowtide.memory_efficient_attention(query, query, query),
    "with a bias": lambda: lowtide.memory_efficient_attention(query, query, query, bias),
    "scaled_dot_product_attention": lambda: lowtide.scaled_dot_product_attention(query, query, query),
    "chunked_loss": lambda: lowtide.chunked_loss(cross_entropy, head, x, target),
    "recompute": lambda: lowtide.chunked_loss(cross_entropy, head, x, target, mode="recompute"),
    "distillation": lambda: lowtide.distillation.forward_kl(x, w, *teacher),
    "of rows": lambda: lowtide.distillation.jensen_shannon(x, w, *teacher, reduction="none"),
    "z_loss": lambda: lowtide.losses.z_loss(x, w, target),
    "info_nce": lambda: lowtide.losses.info_nce(x, w, logit_scale=2.0),
    "defer_logits": lambda: F.cross_entropy(model(x), target),
    "deferred, capped": lambda: F.cross_entropy(30 * torch.tanh(model(x) / 30), target),
    "deferred, shifted": lambda: F.cross_entropy(model(x[None])[:, 1:].flatten(0, 1), target[1:]),
    "deferred, a chunk at a time": lambda: F.cross_entropy(vector * (model(x) + vector) - vector, target),
    "deferred argmax": lambda: model(x).logsumexp(-1) * ((model(x) / 2.0).argmax(-1) == target),
    "deferred topk": lambda: model(x).topk(3).values,
    "deferred max": lambda: model(x).max(-1).values,
    "deferred log-probabilities": lambda: model(x).float().log_softmax(-1).gather(-1, target[:, None]),
    "real": lambda: model(x).sin(),
}
for name, call in calls.items():
    call().sum().backward()
    assert "torch._dynamo" not in sys.modules, name
print(len(calls))
"""


@needs_tracing  # without it lowtide imports Dynamo, to break its graphs
def test_first_call_does_not_import_dynamo(plain_environment):
    arguments = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(arguments, env=plain_environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["24"]

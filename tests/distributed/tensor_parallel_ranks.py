"""What test_tensor_parallel.py runs as two processes: models whose head is tensor parallel, trained
by their own code with deferred logits, beside one process.

Shapes: B sequences, T tokens, D features, V classes.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import lowtide
from tests.support.ranks import RANKS, generator, largest_errors, mesh_of, whole

B, T, D, V = 2, 5, 8, 37


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.body = nn.Embedding(V, D), nn.Linear(D, D)
        self.lm_head = nn.Linear(D, V, bias="bias" in kind)

    def forward(self, tokens):
        return self.lm_head(self.body(self.embed(tokens)).tanh())


def loss_of(kind, logits, targets):
    if "shifted" in kind:
        logits = logits + torch.linspace(0, 1, V)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))
    if "logsumexp" in kind:
        loss = loss + 0.01 * logits.logsumexp(-1).square().mean()
    if "real" in kind:
        loss = loss + 0.01 * logits.tanh().sin().sum()
    return loss


def build(kind):
    torch.manual_seed(0)
    return Model(kind)


def parallel(kind, model, mesh):
    """The head of torchtitan's loss parallelism, or one that gathers its logits."""
    if "loss parallel" in kind:
        style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    else:
        style = ColwiseParallel(output_layouts=Shard(-1) if kind == "local" else Replicate())
    return parallelize_module(model, mesh, {"lm_head": style})


def compare(model, alone, deferral):
    errors = largest_errors(model, alone)
    return {"errors": errors, "fused": deferral.fused, "materialized": deferral.materialized}


def of_torch(kind, mesh):
    tokens, targets = torch.randint(V, (2, B, T), generator=generator(1))
    model, alone = build(kind), build(kind)
    model = parallel(kind, model, mesh)
    deferral = lowtide.defer_logits(model)
    with loss_parallel():
        loss = loss_of(kind, model(tokens), targets)
        loss.backward()
    loss_of(kind, alone(tokens), targets).backward()
    found = compare(model, alone, deferral)
    deferral.undo()
    logits = whole(model(tokens))
    torch.testing.assert_close(logits, alone(tokens))
    return found


def chunked(kind, mesh):
    """chunked_loss with logits that are DTensors: a plain loss, one process's gradients."""
    mode = "recompute" if "recompute" in kind else "gradient_in_forward"
    tokens, targets = torch.randint(V, (2, B, T), generator=generator(1))
    model, alone = build(kind).double(), build(kind).double()
    model = parallel(kind, model, mesh)

    def of_rows(logits, targets, reduction="sum"):
        return F.cross_entropy(logits, targets, reduction=reduction)

    def loss_of(each, loss_fn, **options):
        hidden = each.body(each.embed(tokens)).tanh()
        return lowtide.chunked_loss(loss_fn, each.lm_head, hidden, targets, chunk_size=3, **options)

    with loss_parallel():
        loss = loss_of(model, of_rows, mode=mode) / targets.numel()
        loss.backward()
        with pytest.raises(ValueError, match="got their mean"):
            loss_of(model, lambda *rows: of_rows(*rows, "mean"), mode=mode)
    expected = loss_of(alone, of_rows) / targets.numel()
    expected.backward()
    assert type(loss) is torch.Tensor
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    return {"errors": largest_errors(model, alone)}


def of_transformers(kind, mesh):
    import transformers

    # V + 1: Transformers gathers the logits only of classes that the ranks divide.
    config = transformers.LlamaConfig(
        vocab_size=V + 1, hidden_size=D, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    alone = transformers.LlamaForCausalLM(config)
    model = saved_and_loaded(alone)
    assert isinstance(model.lm_head.weight, DTensor), type(model.lm_head.weight)
    tokens = torch.randint(V, (B, T), generator=generator(1))
    alone.train()
    with torch.no_grad():
        before = model.eval()(tokens).logits
    model.train()
    deferral = lowtide.defer_logits(model)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    expected = alone(tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    found = compare(model, alone, deferral)
    for _ in range(2):  # deferred, in eval mode; and undone
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(tokens).logits, before, rtol=0, atol=0)
        deferral.undo()
    return found


def saved_and_loaded(model):
    import tempfile

    import torch.distributed as dist
    import transformers
    import transformers.distributed

    box = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box)
    if dist.get_rank() == 0:
        model.save_pretrained(box[0])
    dist.barrier()
    config = transformers.distributed.DistributedConfig(tp_plan="auto", tp_size=RANKS)
    return transformers.AutoModelForCausalLM.from_pretrained(box[0], distributed_config=config)


def run(kind, rank):
    mesh = mesh_of(RANKS)
    if "chunked" in kind:
        return chunked(kind, mesh)
    return (of_transformers if "transformers" in kind else of_torch)(kind, mesh)

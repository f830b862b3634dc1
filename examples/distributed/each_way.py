"""Divide a head each way: `torchrun --nproc-per-node=2 examples/distributed/each_way.py`, on CPU.

    fsdp       FSDP2, the head a unit of its own
    sharded    FSDP2, the head's classes left where they lie (lowtide.shard_head)
    tensor     tensor parallelism: every rank has the same tokens
    sequence   the same, each rank with its part of every sequence
    grpo       log-probabilities of sampled tokens over a tensor parallel head

Each is compared with one process that has all of the data. Run one of them by its name:
`torchrun --nproc-per-node=2 examples/distributed/each_way.py tensor`.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import lowtide

SEQUENCES, TOKENS, FEATURES, CLASSES = 4, 32, 16, 1001
LABELS = torch.randint(CLASSES, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
LABELS[0, 5:] = -100  # ranks count differently
INPUT = torch.randn(SEQUENCES, TOKENS, FEATURES, generator=torch.Generator().manual_seed(1))
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -1.0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, input):
        return self.body(input).tanh()


def build():
    torch.manual_seed(0)
    return Model()


def data_parallel(mesh, sharded):
    """Return the model and its loss, which is the mean over all ranks' tokens."""
    model, own = build(), set()
    if sharded:
        own = lowtide.shard_head(model, mesh, head=model.head)
    else:
        fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=own)
    input, labels = (each.chunk(mesh.size())[mesh.get_local_rank()] for each in (INPUT, LABELS))
    normalizer = lowtide.tokens_per_rank(labels)
    loss = lowtide.linear_cross_entropy(model(input), model.head.weight, labels, normalizer=normalizer)
    loss.backward()
    return model, loss.detach()


def tensor_parallel(mesh, by_sequence):
    """Return the model and its loss; the body is replicated."""
    model = build()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    if by_sequence:
        input, labels = (each.chunk(mesh.size(), 1)[mesh.get_local_rank()] for each in (INPUT, LABELS))
    else:
        input, labels = INPUT, LABELS
    weight = model.head.weight
    loss = lowtide.linear_cross_entropy(model(input), weight, labels, tokens_sharded=by_sequence)
    loss.backward()
    if by_sequence:  # each rank has the body's gradient from its own tokens
        for parameter in model.body.parameters():
            dist.all_reduce(parameter.grad)
    return model, loss.detach()


def grpo(mesh):
    """Return the model and the loss of one step of GRPO over a tensor parallel head."""
    model = build()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    out = lowtide.linear_log_probs(model(INPUT), model.head.weight, LABELS)
    loss = lowtide.losses.grpo(out.log_prob, None, ADVANTAGES, LABELS != -100)
    loss.backward()
    return model, loss.detach()


def alone(name):
    """Return the model and the loss of one process, by torch alone."""
    model = build()
    logits = model.head(model(INPUT))
    if name == "grpo":
        log_prob = -F.cross_entropy(logits.movedim(-1, 1), LABELS, reduction="none")
        loss = lowtide.losses.grpo(log_prob, None, ADVANTAGES, LABELS != -100)
    else:
        loss = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    loss.backward()
    return model, loss.detach()


WAYS = {
    "fsdp": lambda mesh: data_parallel(mesh, sharded=False),
    "sharded": lambda mesh: data_parallel(mesh, sharded=True),
    "tensor": lambda mesh: tensor_parallel(mesh, by_sequence=False),
    "sequence": lambda mesh: tensor_parallel(mesh, by_sequence=True),
    "grpo": grpo,
}


def main(names):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in names:
        model, loss = WAYS[name](mesh)
        if name in ("fsdp", "sharded"):  # a rank's part of the mean
            dist.all_reduce(loss)
            loss /= mesh.size()
        whole, expected = alone(name)
        error = 0.0
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            gradient = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
            error = max(error, ((gradient - other.grad).abs().max() / other.grad.abs().max()).item())
        if dist.get_rank() == 0:
            print(f"{name}: loss {loss:.5f}, one process {expected:.5f}, gradients apart by {error:.0e}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1:] or WAYS)
    dist.destroy_process_group()

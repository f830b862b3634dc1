"""torch.compile around it and inside it; nothing waits for the device."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from lowtide.memory import peak_memory
from tests.conftest import ON_CUDA_ALONE
from tests.ops.chunked_loss.helpers import (
    MODES,
    D,
    cast,
    chunked_loss,
    close,
    cross_entropy,
    dense,
    gradients,
    leaves,
    make,
    relative,
)
from tests.support.extended import all_extended_but
from tests.support.loss import no_synchronisation

# torch.compile itself gives these warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]


@pytest.fixture(autouse=True)
def _afresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("mode", all_extended_but(["gradient_in_forward"], MODES))
def test_compile_step_breaks_graph(device, mode):
    """What comes before and after is compiled, with its backward; the chunks are not."""
    head, hidden, labels = make(device=device)
    trunk = nn.Linear(D, D).to(device, torch.float64)
    graphs = []

    def backend(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return aot_eager(module, inputs)

    def step(hidden, labels, loss_of):
        loss = loss_of(cross_entropy, head, trunk(hidden).tanh(), labels, chunk_size=5, mode=mode)
        loss = loss / labels.ne(-100).sum()
        loss *= 0.5
        return loss

    every = [*leaves(head, hidden), *trunk.parameters()]
    compiled = torch.compile(step, backend=backend)
    close(
        torch.autograd.grad(compiled(hidden, labels, chunked_loss), every),
        torch.autograd.grad(step(hidden, labels, dense), every),
    )
    first, *others = (" ".join(each) for each in graphs)
    assert "tanh" in first
    assert any("imul" in each for each in others)
    assert not any("cross_entropy" in each for each in others)


@pytest.mark.extended
@pytest.mark.parametrize("mode", MODES)
def test_compile_step_memory(device, mode):
    """And the compiled dense step does not."""
    N, C, D, V = 512, 16, 8, 4096
    trunk, head = nn.Linear(D, D).to(device), nn.Linear(D, V).to(device)
    hidden, labels = torch.randn(N, D, device=device), torch.randint(V, (N,), device=device)
    peaks = []
    for loss_of in (chunked_loss, dense):

        def step(hidden, labels, loss_of=loss_of):
            return loss_of(cross_entropy, head, trunk(hidden).tanh(), labels, chunk_size=C, mode=mode) / N

        compiled = torch.compile(step, backend=aot_eager)
        for _ in range(2):
            with peak_memory(device) as peak:
                compiled(hidden, labels).backward()
        peaks.append(peak)
    chunked, whole = peaks
    of_the_chunk, of_the_head = 4 * C * V * 4, 2 * (V * D + V) * 4
    assert chunked.bytes <= of_the_chunk + of_the_head + 8 * N * D * 4
    assert chunked.largest <= C * V * 4
    assert whole.largest >= N * V * 4


@pytest.mark.parametrize("mode", MODES)
def test_compiled_autograd(mode, monkeypatch):
    """A graph of the whole backward leaves out that of the chunks, which runs eagerly."""
    monkeypatch.undo()  # conftest.py's torch.empty would be traced
    head, hidden, labels = make()
    every = leaves(head, hidden)

    def step():
        loss = chunked_loss(cross_entropy, head, hidden * 2, labels, chunk_size=5, mode=mode) * 0.3
        loss.backward(retain_graph=True)
        loss.backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")()
    loss = dense(cross_entropy, head, hidden * 2, labels) * 0.6
    close([each.grad for each in every], torch.autograd.grad(loss, every))


def test_compile_fullgraph_refused():
    head, hidden, labels = make()

    @torch.compile(fullgraph=True, backend=aot_eager)
    def step(hidden):
        return chunked_loss(cross_entropy, head, hidden, labels)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the step without fullgraph"):
        step(hidden)


@pytest.mark.parametrize("mode", all_extended_but(["gradient_in_forward"], MODES))
def test_compile_head(device, mode):
    head, hidden, labels = make(device=device)
    compiled = torch.compile(head, backend=aot_eager)
    results = [gradients(chunked_loss, compiled, hidden, labels, chunk_size=6, mode=mode)]
    results.append(gradients(dense, head, hidden, labels))
    close(*([result[0], *sorted(result[1:], key=lambda each: each.shape)] for result in results))


def soft_capped(logits, labels):
    capped = 5 * torch.tanh(logits / 5)
    return cross_entropy(capped * torch.sigmoid(capped), labels)


@pytest.mark.extended
@pytest.mark.parametrize("which", ["head", "loss_fn"])
def test_compile_float16(device, which):
    """Code that was compiled for graphs that are not retained raises where one is."""
    head, hidden, labels = make(device=device, dtype=torch.float16)
    own_head = torch.compile(head) if which == "head" else head
    own_loss = torch.compile(soft_capped) if which == "loss_fn" else soft_capped
    exact = cast(head, hidden)
    truth = torch.autograd.grad(dense(soft_capped, *exact, labels), leaves(*exact))
    plain = torch.autograd.grad(dense(soft_capped, head, hidden, labels), leaves(head, hidden))
    for mode in ("recompute", "gradient_in_forward"):  # the first retains no graph
        with torch._functorch.config.patch(enable_autograd_cache=False):  # of what others compiled
            loss = chunked_loss(own_loss, own_head, hidden, labels, chunk_size=6, mode=mode)
            found = torch.autograd.grad(loss, leaves(head, hidden))
        for ours, eager, want in zip(found, plain, truth):
            assert relative(ours, want) <= 2 * relative(eager, want) + torch.finfo(torch.float16).eps


@ON_CUDA_ALONE
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_device_sync(device, dtype, mode):
    head, hidden, labels = make("two layers", device=device, dtype=dtype)
    hidden = hidden.detach()[:, :-1].requires_grad_()
    upstream = torch.ones((), device=device)

    def step():
        loss = chunked_loss(cross_entropy, head, hidden, labels[:, :-1], chunk_size=5, mode=mode)
        torch.autograd.grad(loss, leaves(head, hidden), upstream)

    step()  # kernels are compiled, libraries loaded
    with no_synchronisation(device):
        step()

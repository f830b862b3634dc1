"""FSDP2 of Transformers: `torchrun --nproc-per-node=2 examples/distributed/fsdp_transformers.py`.

On two CPU processes, by the model's own code: as FSDP2 has the head, with deferred logits, and with
the head's classes left where they lie. Needs transformers.
"""

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide

SEQUENCES, TOKENS, CLASSES, STEPS = 2, 64, 16000, 3
CONFIG = transformers.LlamaConfig(
    vocab_size=CLASSES,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def train(mesh, way):
    """Return the losses' mean over the ranks after each step, and the peak memory of a step."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(CONFIG)
    own = lowtide.shard_head(model, mesh) if way == "sharded" else set()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=own)
    if way != "eager":
        lowtide.defer_logits(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, peaks = [], []
    for _ in range(STEPS):
        tokens = torch.randint(CLASSES, (SEQUENCES, TOKENS), generator=generator)
        tokens[0, TOKENS // (2 + dist.get_rank()) :] = -100  # ranks count differently
        labels, tokens = tokens, tokens.clamp(min=0)
        items = lowtide.tokens_per_rank(labels[:, 1:])
        with lowtide.peak_memory("cpu") as peak:
            loss = model(tokens, labels=labels, num_items_in_batch=items).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / mesh.size())
        peaks.append(peak.bytes)
    # A message that a thread of gloo releases on a busy machine counts as held: take the least.
    return losses, min(peaks)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for way in ("eager", "deferred", "sharded"):
        losses, peak = train(mesh, way)
        if dist.get_rank() == 0:
            curve = " ".join(f"{loss:.4f}" for loss in losses)
            print(f"{way}: losses {curve}, peak memory of a step {peak / 2**20:.0f} MiB")
    dist.destroy_process_group()

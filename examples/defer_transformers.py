"""A Transformers model in a loop of one's own, compiled, with activation checkpointing, and text
generated between steps: `python examples/defer_transformers.py`, on a CPU. Needs transformers.
"""

import torch
import transformers

import lowtide

BATCH, TOKENS, CLASSES, STEPS = 4, 96, 32000, 3


def train(deferred):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=CLASSES,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config).train()
    new = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.23
    (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if deferred:
        lowtide.defer_logits(model)  # before it is compiled
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # which needs no C++ compiler
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(100, (BATCH, TOKENS))
    for _ in range(STEPS):
        with lowtide.peak_memory("cpu") as peak:
            loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    text = model.generate(tokens[:1, :4], max_new_tokens=4, do_sample=False)
    return loss.item(), text[0, 4:].tolist(), peak.bytes


if __name__ == "__main__":
    for name, deferred in (("as it is", False), ("deferred", True)):
        loss, text, peak = train(deferred)
        print(f"{name}: loss {loss:.5f}, goes on with {text}, peak memory of a step {peak / 2**20:.0f} MiB")

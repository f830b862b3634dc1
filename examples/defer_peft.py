"""LoRA on the head, trained and not skipped: `python examples/defer_peft.py`, on a CPU.

A loss that reads `lm_head.weight` sees the frozen base alone, and leaves the adapter untrained.
Here the head runs its own forward, and the adapter's product is a second term of the fused loss.

Needs transformers and peft.
"""

import warnings

import peft
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
    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters).train()
    if deferred:
        lowtide.defer_logits(model)  # after the adapters
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
    tokens = torch.randint(100, (BATCH, TOKENS))
    for _ in range(STEPS):
        with lowtide.peak_memory("cpu") as peak:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    learned = model.get_base_model().lm_head.lora_B["default"].weight.norm()
    return loss.item(), learned.item(), peak.bytes


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # peft's, of names that transformers has changed
    for name, deferred in (("as it is", False), ("deferred", True)):
        loss, learned, peak = train(deferred)
        print(f"{name}: loss {loss:.5f}, |B| {learned:.4f}, peak memory of a step {peak / 2**20:.0f} MiB")

"""Define a small GPT: pre-norm blocks, rotary positions, causal SDPA, a GELU MLP, a head.

The head may be tied. `forward` returns the hidden states, from which lowtide computes the loss.
"""

# Shapes: B sequences, T tokens of each, D width, H attention heads, K width of one, V vocabulary.

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.tools.demo.config import HEAD_WIDTH


def norm(x_BTD: Tensor) -> Tensor:
    return F.rms_norm(x_BTD, x_BTD.shape[-1:])


def rotary_table(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 10_000.0 ** -torch.linspace(0, 1, HEAD_WIDTH // 2, device=device)
    angles_TK = torch.outer(torch.arange(tokens, device=device).float(), frequencies)
    return angles_TK.cos(), angles_TK.sin()


def rotate(x_BHTK: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    left, right = x_BHTK.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        heads = self.qkv(x_BTD).unflatten(-1, (3, -1, HEAD_WIDTH))
        q_BHTK, k_BHTK, v_BHTK = heads.permute(2, 0, 3, 1, 4)
        q_BHTK, k_BHTK = rotate(norm(q_BHTK), rotary), rotate(norm(k_BHTK), rotary)
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(mixed_BHTK.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.attention(norm(x_BTD), rotary)
        return x_BTD + self.mlp(norm(x_BTD))


class GPT(nn.Module):
    def __init__(self, vocab_size: int, width: int, depth: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise each block as the identity; its first products keep the size of their input.

        Adam's steps have the same size for all weights. With much smaller weights, a rounding error
        would soon lead to another loss curve.
        """
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        for block in self.blocks:
            nn.init.normal_(block.attention.qkv.weight, std=block.attention.qkv.in_features**-0.5)
            nn.init.normal_(block.mlp[0].weight, std=block.mlp[0].in_features ** -0.5)
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp[2].weight)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        rotary = rotary_table(tokens_BT.shape[1], tokens_BT.device)
        x_BTD = norm(self.embedding(tokens_BT))
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary)
        return norm(x_BTD)


@torch.no_grad()
def generate(model: GPT, prompt: list[int], count: int, context: int, seed: int) -> list[int]:
    """Return `prompt` and `count` more tokens, drawn at a temperature of 0.8."""
    generator = torch.Generator().manual_seed(seed)
    device = model.head.weight.device
    tokens = list(prompt)
    for _ in range(count):
        hidden_BTD = model(torch.tensor([tokens[-context:]], device=device))
        probabilities_V = F.softmax(model.head(hidden_BTD[0, -1]).float() / 0.8, dim=-1)
        # Draw on the CPU, so that a seed gives the same text on every device.
        tokens.append(int(torch.multinomial(probabilities_V.cpu(), 1, generator=generator)))
    return tokens

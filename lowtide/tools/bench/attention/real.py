"""List attention of public models as data: the shapes and options of one layer of each.

Heads, features, windows, soft caps and biases are those of the model. The number of batches is
chosen to fill a card, as in training. `source` is the repository on Hugging Face or GitHub, or the
paper, that has the numbers. `checked` names where they were read when this table was made:

* transformers: the defaults of the config class in transformers 5.23, which are this model's;
* code: the code or config of the repository that `source` names;
* an empty string: the numbers follow the authors' description of the model, and were not checked.

Operations of a model before and after attention are left out, since no implementation of attention
computes them. SwinV2 normalises queries and keys and scales the query before, and AlphaFold applies
a gate to the result. T5 does not scale its scores; its initial weights are small instead. A bias
has a gradient if the model learns it or computes it from its inputs. The slopes of ALiBi have none.

Windows of an image that have masks of their own count as heads here, since their bias is the same
for all images: H 128 stands for 16 windows of 8 heads.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from lowtide.tools.bench.attention.cases import (
    BY_HEAD_AND_KEY,
    BY_QUERY_AND_KEY,
    HALF,
    SINGLE,
    AttentionCase,
    Flags,
)

ALL: Flags = (True, True, True, True)  # [B, H, M, N]


class PublishedModel(NamedTuple):
    name: str = ""
    source: str = ""
    checked: str = ""


@dataclass(frozen=True, kw_only=True)
class RealCase(AttentionCase):
    model: PublishedModel


def _packed(total: int, *parts: int) -> tuple[int, ...]:
    """Return these lengths, repeated until they fill the total."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, parts[len(lengths) % len(parts)]))
    return tuple(lengths)


SWIN = PublishedModel("Swin-B", "microsoft/swin-base-patch4-window7-224", "")
SWIN_2 = PublishedModel("SwinV2-B", "microsoft/swinv2-base-patch4-window16-256", "")
SAM = PublishedModel("SAM ViT-H", "facebookresearch/segment-anything", "code")
T5 = PublishedModel("T5-large", "google-t5/t5-large", "")
MT5 = PublishedModel("mT5-base", "google/mt5-base", "")
UMT5 = PublishedModel("UMT5-XXL", "google/umt5-xxl", "")
DEBERTA = PublishedModel("DeBERTa-v3-base", "microsoft/deberta-v3-base", "")
BLOOM = PublishedModel("BLOOM 7.1B", "bigscience/bloom-7b1", "")
MPT = PublishedModel("MPT-7B", "mosaicml/mpt-7b", "")
JINA = PublishedModel("Jina embeddings v2", "jinaai/jina-embeddings-v2-base-en", "")
ALPHAFOLD = PublishedModel("AlphaFold 2", "google-deepmind/alphafold", "code")
OPENFOLD = PublishedModel("OpenFold", "aqlaboratory/openfold", "")
BOLTZ = PublishedModel("Boltz-1", "jwohlwend/boltz", "code")
GRAPHORMER = PublishedModel("Graphormer", "microsoft/Graphormer", "code")
VIT = PublishedModel("ViT-L/16", "google/vit-large-patch16-224", "")
BEIT = PublishedModel("BEiT-B", "microsoft/beit-base-patch16-224", "transformers")
SDXL = PublishedModel("SDXL", "stabilityai/stable-diffusion-xl-base-1.0", "")
KOLORS = PublishedModel("Kolors", "Kwai-Kolors/Kolors", "code")
PIXART = PublishedModel("PixArt-Sigma", "PixArt-alpha/PixArt-sigma", "")
VAE = PublishedModel("Stable Diffusion VAE", "CompVis/stable-diffusion", "")
WHISPER = PublishedModel("Whisper-large-v3", "openai/whisper-large-v3", "")
GEMMA_2 = PublishedModel("Gemma 2 9B", "google/gemma-2-9b", "")
GEMMA_3 = PublishedModel("Gemma 3 4B", "google/gemma-3-4b-pt", "")
GPT_OSS = PublishedModel("gpt-oss-20b", "openai/gpt-oss-20b", "transformers")
MISTRAL = PublishedModel("Mistral 7B v0.1", "mistralai/Mistral-7B-v0.1", "transformers")
LLAMA_8B = PublishedModel("Llama 3 8B", "meta-llama/Meta-Llama-3-8B", "")
LLAMA_70B = PublishedModel("Llama 3 70B", "meta-llama/Meta-Llama-3-70B", "")
DEEPSEEK = PublishedModel("DeepSeek-V3", "deepseek-ai/DeepSeek-V3", "transformers")
GPT_2 = PublishedModel("GPT-2", "openai-community/gpt2", "transformers")
MODERNBERT = PublishedModel("ModernBERT-base", "answerdotai/ModernBERT-base", "transformers")
BERT = PublishedModel("BERT-base", "google-bert/bert-base-uncased", "transformers")

_plain = partial(RealCase, dtype=HALF, device="cuda")
_scores = partial(_plain, bias=BY_QUERY_AND_KEY)
_alibi = partial(_plain, bias=BY_HEAD_AND_KEY, bias_gradient=False, causal=True)
_causal = partial(_plain, causal=True)
_decode = partial(_plain, inference=True)
_smoke = partial(RealCase, model=PublishedModel(), dtype=SINGLE, device="cpu", smoke=True)

SHORT_AND_LONG = _packed(8192, 1500, 300, 2600, 700, 150, 1100)
SENTENCES = _packed(16384, 512, 90, 1024, 300)

REAL_CASES = (
    # Windows of images.
    _scores("swin-b", 2048, 8, 49, 32, model=SWIN),
    _scores("swin-b-shifted", 128, 128, 49, 32, model=SWIN),
    _scores("swinv2-b", 1024, 4, 256, 32, model=SWIN_2),
    _plain("sam-window", 200, 16, 196, 80, bias=ALL, model=SAM),
    # Relative positions of words, learned.
    _scores("t5-encoder", 16, 16, 512, 64, model=T5),
    _scores("t5-padded", 16, 16, 512, 64, padded=True, model=T5),
    _scores("t5-decoder", 16, 16, 512, 64, causal=True, model=T5),
    _scores("t5-long", 2, 16, 4096, 64, model=T5),
    _scores("mt5-base", 8, 12, 1024, 64, model=MT5),
    _scores("umt5-xxl", 4, 64, 512, 64, model=UMT5),
    _plain("deberta-v3", 16, 12, 512, 64, bias=ALL, model=DEBERTA),
    # ALiBi: slopes.
    _alibi("bloom-7b", 2, 32, 2048, 128, model=BLOOM),
    _alibi("mpt-7b", 1, 32, 8192, 128, model=MPT),
    _scores("jina-v2", 4, 12, 2048, 64, bias_gradient=False, model=JINA),
    # Molecules.
    _scores("triangle", 384, 4, 384, 32, model=ALPHAFOLD),
    _scores("triangle-fp32", 384, 4, 384, 32, dtype=SINGLE, model=ALPHAFOLD),
    _scores("msa-row", 512, 8, 384, 32, model=ALPHAFOLD),
    _scores("extra-msa-row", 1024, 8, 256, 8, model=OPENFOLD),
    _plain("msa-column", 384, 8, 512, 32, model=ALPHAFOLD),
    _scores("pair-bias", 1, 16, 512, 24, model=BOLTZ),
    _scores("pair-bias-diffusion", 16, 16, 512, 48, model=BOLTZ),
    _scores("pair-bias-fp32", 16, 16, 512, 48, dtype=SINGLE, model=BOLTZ),
    _plain("atom-windows", 2304, 4, 32, 32, N=128, bias=ALL, model=BOLTZ),
    _plain("graphormer", 256, 32, 64, 24, bias=ALL, model=GRAPHORMER),
    # Images.
    _plain("sam-global", 8, 16, 4096, 80, bias=ALL, model=SAM),
    _plain("vit-l-512", 32, 16, 1025, 64, model=VIT),
    _scores("beit-b", 64, 12, 197, 64, model=BEIT),
    _plain("cross-77", 4, 10, 4096, 64, N=77, model=SDXL),
    _plain("cross-256", 4, 10, 4096, 64, N=256, model=KOLORS),
    _plain("cross-padded", 4, 16, 4096, 72, N=300, padded=True, model=PIXART),
    _plain("vae-512", 2, 1, 4096, 512, model=VAE),
    _plain("vae-1024", 1, 1, 16384, 512, model=SDXL),
    # Speech.
    _plain("whisper-encoder", 8, 20, 1500, 64, model=WHISPER),
    _plain("whisper-cross", 8, 20, 448, 64, N=1500, model=WHISPER),
    # Language models.
    _causal("gemma-2-global", 1, 16, 8192, 256, G=8, softcap=50.0, model=GEMMA_2),
    _causal("gemma-2-local", 1, 16, 8192, 256, G=8, softcap=50.0, window=(4095, 0), model=GEMMA_2),
    _causal("gemma-3-global", 1, 8, 8192, 256, G=4, model=GEMMA_3),
    _causal("gemma-3-local", 1, 8, 8192, 256, G=4, window=(1023, 0), model=GEMMA_3),
    _causal("gpt-oss-global", 1, 64, 4096, 64, G=8, sinks=True, model=GPT_OSS),
    _causal("gpt-oss-local", 1, 64, 4096, 64, G=8, sinks=True, window=(127, 0), model=GPT_OSS),
    _causal("mistral-local", 1, 32, 16384, 128, G=8, window=(4095, 0), model=MISTRAL),
    _causal("gqa-8", 1, 64, 8192, 128, G=8, model=LLAMA_70B),
    _causal("mla", 1, 128, 4096, 192, E=128, model=DEEPSEEK),
    _causal("gpt-2-fp32", 1, 12, 8192, 64, dtype=SINGLE, model=GPT_2),
    # Sequences of several lengths, and padding.
    _causal("packed-causal", 1, 32, 8192, 128, G=8, lengths=SHORT_AND_LONG, model=LLAMA_8B),
    _plain("packed-global", 1, 12, 16384, 64, lengths=SENTENCES, model=MODERNBERT),
    _plain("packed-local", 1, 12, 16384, 64, lengths=SENTENCES, window=(64, 64), model=MODERNBERT),
    _plain("padded", 32, 12, 512, 64, padded=True, model=BERT),
    # Decoding: one query, a few (speculative), and the later part of a prompt.
    _decode("decode", 32, 32, 1, 128, G=8, N=8192, model=LLAMA_8B),
    _decode("decode-gqa-8", 8, 64, 1, 128, G=8, N=32768, model=LLAMA_70B),
    _decode("decode-few", 32, 32, 8, 128, G=8, N=8192, causal=True, model=LLAMA_8B),
    _decode("prefill", 1, 32, 512, 128, G=8, N=16384, causal=True, model=LLAMA_8B),
    # These cases are of no public model: they have every option, in a size for a CPU.
    _smoke("smoke-bias", 6, 2, 17, 8, bias=BY_QUERY_AND_KEY),
    _smoke("smoke-bias-of-all", 2, 3, 17, 8, N=33, bias=ALL),
    _smoke("smoke-alibi", 2, 2, 24, 8, bias=BY_HEAD_AND_KEY, bias_gradient=False, causal=True),
    _smoke("smoke-padded", 3, 2, 24, 8, N=40, padded=True),
    _smoke("smoke-bias-padded", 3, 2, 24, 8, bias=BY_QUERY_AND_KEY, padded=True),
    _smoke("smoke-softcap", 1, 4, 33, 8, G=2, causal=True, softcap=2.0, window=(6, 0)),
    _smoke("smoke-sinks", 1, 4, 33, 8, G=2, causal=True, sinks=True, window=(9, 0)),
    _smoke("smoke-packed", 1, 4, 40, 8, G=2, causal=True, lengths=(17, 5, 18)),
    _smoke("smoke-packed-local", 1, 2, 40, 8, lengths=(17, 5, 18), window=(3, 3)),
    _smoke("smoke-values", 1, 2, 24, 12, E=8, causal=True),
    _smoke("smoke-decode", 2, 4, 1, 8, G=2, N=40, inference=True),
    _smoke("smoke-prefill", 1, 4, 8, 8, G=2, N=40, causal=True, inference=True),
)


def real_cases(device: str) -> list[RealCase]:
    """Return all cases on this device; on a CPU half precision is float32."""
    if device == "cuda":
        return [replace(case, device=device) for case in REAL_CASES]
    return [replace(case, device=device, dtype=torch.float32) for case in REAL_CASES]

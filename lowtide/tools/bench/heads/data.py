"""List the heads of public models as data.

`features` (D) and `classes` (V) are those of the stored weight [V, D], including any padding of the
vocabulary by the model's authors. `source` is the repository of the model's config on Hugging Face.
`checked` names where the numbers were read when this table was made:

* transformers: the defaults of the config class in transformers 5.23, which are this model's;
* litgpt: litgpt/config.py of Lightning-AI/litgpt at 2685705, except for the classes of Gemma 3 27B,
  which are those of transformers (litgpt leaves out 64 of them);
* maxtext: configs/models/ of AI-Hypercomputer/maxtext at e591f30;
* config: copies of the model's own config.json in several public repositories.

Heads with a bias of the classes (GPT-J, Phi-2) are left out, because some packages take no bias.
"""

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class ModelHead:
    name: str
    features: int
    classes: int
    source: str
    checked: str
    tied: bool = False
    """True if the weight is also that of the embedding."""
    softcap: float | None = None
    smoke: bool = False


_tied = partial(ModelHead, tied=True)

HEADS = (
    _tied("GPT-2", 768, 50257, "openai-community/gpt2", "transformers"),
    _tied("GPT-2-medium", 1024, 50257, "openai-community/gpt2-medium", "config"),
    _tied("GPT-2-large", 1280, 50257, "openai-community/gpt2-large", "config"),
    _tied("GPT-2-XL", 1600, 50257, "openai-community/gpt2-xl", "config"),
    _tied("BERT", 768, 30522, "google-bert/bert-base-uncased", "transformers"),
    _tied("RoBERTa", 768, 50265, "FacebookAI/roberta-base", "transformers"),
    _tied("XLM-RoBERTa", 768, 250002, "FacebookAI/xlm-roberta-base", "config"),
    _tied("ModernBERT", 768, 50368, "answerdotai/ModernBERT-base", "transformers"),
    _tied("BART-large", 1024, 50265, "facebook/bart-large", "transformers"),
    _tied("T5-small", 512, 32128, "google-t5/t5-small", "transformers"),
    _tied("Whisper-tiny", 384, 51865, "openai/whisper-tiny", "transformers"),
    _tied("Whisper-large-v3", 1280, 51866, "openai/whisper-large-v3", "config"),
    _tied("OPT-125M", 768, 50272, "facebook/opt-125m", "transformers"),
    _tied("BLOOM-560M", 1024, 250880, "bigscience/bloom-560m", "config"),
    _tied("BLOOM", 14336, 250880, "bigscience/bloom", "config"),
    ModelHead("GPT-NeoX-20B", 6144, 50432, "EleutherAI/gpt-neox-20b", "transformers"),
    ModelHead("Pythia-160M", 768, 50304, "EleutherAI/pythia-160m", "litgpt"),
    ModelHead("Pythia-6.9B", 4096, 50432, "EleutherAI/pythia-6.9b", "litgpt"),
    _tied("Falcon-7B", 4544, 65024, "tiiuae/falcon-7b", "litgpt"),
    ModelHead("OLMo-7B", 4096, 50304, "allenai/OLMo-7B-hf", "litgpt"),
    ModelHead("OLMo-2-7B", 4096, 100352, "allenai/OLMo-2-1124-7B", "litgpt"),
    ModelHead("OLMo-3-7B", 4096, 100278, "allenai/Olmo-3-1025-7B", "maxtext"),
    ModelHead("OLMo-3-32B", 5120, 100278, "allenai/Olmo-3-1125-32B", "maxtext"),
    ModelHead("Llama-2-7B", 4096, 32000, "meta-llama/Llama-2-7b-hf", "litgpt"),
    ModelHead("Llama-2-70B", 8192, 32000, "meta-llama/Llama-2-70b-hf", "litgpt"),
    _tied("Llama-3.2-1B", 2048, 128256, "meta-llama/Llama-3.2-1B", "litgpt"),
    ModelHead("Llama-3-8B", 4096, 128256, "meta-llama/Meta-Llama-3-8B", "litgpt"),
    ModelHead("Llama-3-70B", 8192, 128256, "meta-llama/Meta-Llama-3-70B", "litgpt"),
    ModelHead("Llama-3.1-405B", 16384, 128256, "meta-llama/Llama-3.1-405B", "litgpt"),
    ModelHead("Llama-4-Scout", 5120, 202048, "meta-llama/Llama-4-Scout-17B-16E", "maxtext"),
    ModelHead("Mistral-7B-v0.3", 4096, 32768, "mistralai/Mistral-7B-v0.3", "litgpt"),
    ModelHead("Mixtral-8x22B", 6144, 32768, "mistralai/Mixtral-8x22B-v0.1", "litgpt"),
    ModelHead("Mistral-Small-3.1", 5120, 131072, "mistralai/Mistral-Small-3.1-24B-Base-2503", "transformers"),
    ModelHead("Phi-3-mini", 3072, 32064, "microsoft/Phi-3-mini-4k-instruct", "litgpt"),
    ModelHead("Phi-4", 5120, 100352, "microsoft/phi-4", "litgpt"),
    _tied("Phi-4-mini", 3072, 200064, "microsoft/Phi-4-mini-instruct", "litgpt"),
    _tied("SmolLM2-135M", 576, 49152, "HuggingFaceTB/SmolLM2-135M", "litgpt"),
    _tied("Granite-3.1-3B-A800M", 1536, 49155, "ibm-granite/granite-3.1-3b-a800m-instruct", "config"),
    _tied("Qwen2.5-0.5B", 896, 151936, "Qwen/Qwen2.5-0.5B", "litgpt"),
    _tied("Qwen2.5-1.5B", 1536, 151936, "Qwen/Qwen2.5-1.5B", "maxtext"),
    ModelHead("Qwen2.5-7B", 3584, 152064, "Qwen/Qwen2.5-7B", "maxtext"),
    ModelHead("Qwen2.5-72B", 8192, 152064, "Qwen/Qwen2.5-72B", "litgpt"),
    _tied("Qwen3-0.6B", 1024, 151936, "Qwen/Qwen3-0.6B", "maxtext"),
    _tied("Qwen3-4B", 2560, 151936, "Qwen/Qwen3-4B", "maxtext"),
    ModelHead("Qwen3-8B", 4096, 151936, "Qwen/Qwen3-8B", "maxtext"),
    ModelHead("Qwen3.5-397B-A17B", 4096, 248320, "Qwen/Qwen3.5-397B-A17B", "maxtext"),
    _tied("Gemma-2B", 2048, 256000, "google/gemma-2b", "litgpt"),
    _tied("Gemma-2-2B", 2304, 256000, "google/gemma-2-2b", "litgpt", softcap=30.0),
    _tied("Gemma-2-9B", 3584, 256000, "google/gemma-2-9b", "litgpt", softcap=30.0),
    _tied("Gemma-2-27B", 4608, 256000, "google/gemma-2-27b", "litgpt", softcap=30.0),
    _tied("Gemma-3-1B", 1152, 262144, "google/gemma-3-1b-pt", "litgpt"),
    _tied("Gemma-3-12B", 3840, 262208, "google/gemma-3-12b-pt", "config"),
    _tied("Gemma-3-27B", 5376, 262208, "google/gemma-3-27b-pt", "litgpt"),
    _tied("Command-R", 8192, 256000, "CohereLabs/c4ai-command-r-v01", "transformers"),
    ModelHead("DeepSeek-V2-Lite", 2048, 102400, "deepseek-ai/DeepSeek-V2-Lite", "maxtext"),
    ModelHead("DeepSeek-V3", 7168, 129280, "deepseek-ai/DeepSeek-V3", "maxtext"),
    ModelHead("Kimi-K2", 7168, 163840, "moonshotai/Kimi-K2-Base", "maxtext"),
    ModelHead("gpt-oss-20b", 2880, 201088, "openai/gpt-oss-20b", "maxtext"),
    ModelHead("GLM-4-9B", 4096, 151552, "zai-org/GLM-4-9B-0414", "transformers"),
    # These heads are of no public model: they are small enough for a CPU, and have an odd
    # vocabulary or a soft cap.
    ModelHead("smoke-odd", 60, 1003, "", "", smoke=True),
    ModelHead("smoke-capped", 64, 1024, "", "", softcap=30.0, smoke=True),
)

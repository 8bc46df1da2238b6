"""Generates the documentation's table of model families from tiny models with random weights.

``python -m tests.integration.torch.family_table`` writes it; the test fails if it is out of date.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from backends.torch.loader import ModelLocation
from backends.torch.model import load_model_runner
from backends.torch.model_files import ModelError

PAGE = Path(__file__).parents[3] / "docs" / "model-families.md"
_MARK = "<!-- the table: python -m tests.integration.torch.family_table -->\n"
_SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_LONG_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 8.0, 16.0, 32.0],
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in (
            "llama", "qwen2", "qwen3", "mistral", "ministral3", "gemma", "gemma2", "gemma3_text",
            "smollm3", "phi", "phi3", "granite", "olmo2", "olmo3", "starcoder2", "glm", "glm4",
            "exaone4", "cohere2", "ernie4_5", "gpt2", "gpt_neox", "stablelm", "falcon", "bloom",
            "mpt", "diffllama", "mamba", "recurrent_gemma",
        )
    },
    "phi3, LongRoPE": ("phi3", _LONG_ROPE),
    **{
        name: (name, _EXPERTS)
        for name in (
            "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "granitemoe",
            "ernie4_5_moe", "llama4_text", "qwen3_next",
        )
    },
    "deepseek_v3": ("deepseek_v3", {**_EXPERTS, **_LATENT}),
}  # fmt: skip

_OWN_SIZES = ("falcon", "bloom", "mpt", "mamba", "gpt2", "gpt_neox")
"""Model types that lack some of the common sizes."""
_COMMON_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def load_family(kind: str, options: dict[str, Any]) -> str:
    """Load a tiny model of this type; return ``served`` or the reason for the rejection."""
    torch.manual_seed(4)
    config_class: Any = CONFIG_MAPPING[kind]
    auto: Any = AutoModelForCausalLM
    sizes = {**_SIZES, **options}
    if kind in _OWN_SIZES:
        sizes = {name: sizes[name] for name in _COMMON_SIZES}
    with tempfile.TemporaryDirectory() as folder:
        auto.from_config(config_class(**sizes)).save_pretrained(folder)
        try:
            load_model_runner(ModelLocation(folder, "generate"), "cpu", "auto", None)
        except ModelError as error:
            reason = str(error).replace(f"{folder}: ", "").partition("not supported: ")[2]
            return f"refused: {reason or error}"
    return "served"


def build_table() -> str:
    """Build the table in Markdown."""
    return "".join(_list_rows())


def _list_rows() -> Iterator[str]:
    yield "| model type | |\n| --- | --- |\n"
    for name, (kind, options) in sorted(_FAMILIES.items()):
        yield f"| `{name}` | {load_family(kind, options)} |\n"


def replace_table(page: str, table: str) -> str:
    """Return the page with this table."""
    return page.partition(_MARK)[0] + _MARK + "\n" + table


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text("utf-8"), build_table()), "utf-8")

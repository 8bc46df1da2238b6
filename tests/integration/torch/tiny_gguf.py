"""Writes the tiny model as a GGUF file, like llama.cpp's converter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.tiny_model import byte_tokenizer, tiny_llama

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(file: Path, choose_kind: Callable[[str], Any] = lambda name: None) -> Path:
    """Write the GGUF file and return ``file``. Its only token of several bytes is ``he``.

    ``choose_kind`` is called with the name of a matrix and returns its quantization; None: float32.
    """
    model = tiny_llama()
    writer = gguf.GGUFWriter(str(file), "llama")
    _describe(writer, model.config)
    for name, weight in model.state_dict().items():
        data = _interleave_heads(name, weight.numpy(), model.config)
        for theirs, gguf_name in _NAMES.items():
            name = name.replace(theirs, gguf_name)  # noqa: PLW2901 - several parts of it
        kind = choose_kind(name) if data.ndim > 1 else None
        data = np.ascontiguousarray(data)
        if kind is None:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _describe(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens[257] = "he"
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 1, 3])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(config.eos_token_id)


def _interleave_heads(name: str, data: Any, config: Any) -> Any:
    """Interleave the two halves of each rotary head, as GGUF stores them."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, number in heads.items():
        if part in name:
            halves = data.reshape(number, 2, data.shape[0] // number // 2, -1)
            return halves.swapaxes(1, 2).reshape(data.shape)
    return data

"""A model of Qwen2.5-1.5B's shape with random 4-bit weights: for measures of memory and speed."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

_LAYERS, _HIDDEN, _INNER = 28, 1536, 8960
_HEADS, _KEY_HEADS, _HEAD_SIZE = 12, 2, 128
"""Qwen2.5-1.5B's."""
_SCALE = 0.02


def write_large_model(source: Path, target: Path) -> None:
    """Write a GGUF file with random Q4_0 weights and the tokenizer of ``source``."""
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "qwen2")
    tokens = _copy_tokenizer(gguf.GGUFReader(source), writer)
    writer.add_block_count(_LAYERS)
    writer.add_context_length(32768)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KEY_HEADS)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(tokens)
    dice = np.random.default_rng(39)

    def add_matrix(name: str, outputs: int, inputs: int, kind: Any = None) -> None:
        weights = dice.standard_normal((outputs, inputs), dtype=np.float32) * np.float32(_SCALE)
        form = kind or gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(f"{name}.weight", gguf.quantize(weights, form), raw_dtype=form)

    def add_vector(name: str, size: int, value: float = 1.0) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    add_matrix("token_embd", tokens, _HIDDEN, gguf.GGMLQuantizationType.Q8_0)
    add_vector("output_norm.weight", _HIDDEN)
    keys = _KEY_HEADS * _HEAD_SIZE
    for layer in (f"blk.{i}." for i in range(_LAYERS)):
        for name, outputs in (("q", _HIDDEN), ("k", keys), ("v", keys)):
            add_matrix(f"{layer}attn_{name}", outputs, _HIDDEN)
            add_vector(f"{layer}attn_{name}.bias", outputs, _SCALE)
        add_matrix(f"{layer}attn_output", _HIDDEN, _HIDDEN)
        add_matrix(f"{layer}ffn_gate", _INNER, _HIDDEN)
        add_matrix(f"{layer}ffn_up", _INNER, _HIDDEN)
        add_matrix(f"{layer}ffn_down", _HIDDEN, _INNER)
        add_vector(f"{layer}attn_norm.weight", _HIDDEN)
        add_vector(f"{layer}ffn_norm.weight", _HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


def _copy_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> int:
    """Copy the fields of a tokenizer; returns the number of its tokens."""
    for field in reader.fields.values():
        if field.name.startswith("tokenizer."):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    return len(reader.fields["tokenizer.ggml.tokens"].contents())

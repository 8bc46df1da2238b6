"""Adapters, quantized weights and vision models are rejected by name, at check and at load."""

import json
from pathlib import Path
from typing import Any

import pytest

from backends.torch.loader import find_model
from backends.torch.model_files import UnsupportedModelError
from gateway.config.errors import ConfigError
from gateway.config.loader import load_text

ADAPTER = {"adapter_config.json": {"base_model_name_or_path": "org/base"}}
QUANTIZED = {"config.json": {"model_type": "llama", "quantization_config": {"quant_method": "awq"}}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MIXTURE = {"config.json": {"num_experts": 8, "quantization_config": GPTQ}}
VISION = {
    "config.json": {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {},
        "audio_config": {},
    }
}
TEXT_HALF: dict[str, Any] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"model_type": "gemma3_text"},
    "vision_config": {},
}
CASES: list[tuple[dict[str, Any], str]] = [
    (ADAPTER, r"is a LoRA adapter of org/base, .* vLLM \(--enable-lora\) in a pool"),
    ({"adapter_config.json": []}, "is a LoRA adapter, which"),
    (QUANTIZED, "weights quantized by awq, .* vLLM or llama.cpp in a pool"),
    ({"config.json": {"quantization_config": True}}, "quantized by an unknown method"),
    (MIXTURE, "mixture of experts with quantized weights, .* vLLM"),
    (VISION, "model of vision and audio inputs, .* vLLM or llama.cpp in a pool"),
    (
        {"config.json": {**TEXT_HALF, "quantization_config": GPTQ}},
        "model of vision inputs, whose text half .* only from float weights: .* vLLM",
    ),
    (
        {"config.json": {**TEXT_HALF, "text_config": {"layer_types": ["conv"]}}},
        "layers of type conv",
    ),
]


FILES_AT_CHECK: list[tuple[dict[str, Any], str]] = [
    ({}, "contains no model"),
    ({"a.gguf": "GGUF", "b.gguf": "GGUF"}, r"several models; configure one of a\.gguf, b\.gguf"),
    ({"a.gguf": {"GGUF": 3}}, "is no GGUF file: it starts with b'{\"GG'"),
    ({"config.json": {"model_type": "llama"}}, "has no weights in safetensors"),
    ({"config.json": {"model_type": "qwen3_next"}}, "type qwen3_next .* recurrent .* vLLM"),
    (
        {"config.json": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}},
        "type lfm2 .* layers of type conv",
    ),
]
"""What is seen in the files, without torch, before a model is loaded."""


def write_files(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), "utf-8")
    return folder


@pytest.mark.parametrize(("files", "text"), CASES)
def test_files_are_refused_at_load(tmp_path: Path, files: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        find_model(str(write_files(tmp_path, files)), print)


@pytest.mark.parametrize(("files", "text"), CASES + FILES_AT_CHECK)
def test_files_are_refused_at_check(tmp_path: Path, files: dict[str, Any], text: str) -> None:
    write_files(tmp_path, files)
    config = f"backends: {{own: {{kind: torch, path: {json.dumps(str(tmp_path))}}}}}\n"
    with pytest.raises(ConfigError, match=text) as excinfo:
        load_text(config + "models: {m: {backend: own}}\n", "<test>", env={})

    assert "at backends.own.path" in str(excinfo.value)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("dtype: int8", "stay quantized: set dtype: auto"),
        ("dtype: float32", "stay quantized: set dtype: auto"),
        ("dtype: bfloat16", "stay quantized: set dtype: auto"),
        ("task: embedding", "only read for text generation"),
    ],
)
def test_settings_that_quantized_weights_do_not_have_are_refused_at_check(
    tmp_path: Path, setting: str, text: str
) -> None:
    """Given a packed checkpoint, its folder is valid, but not with this setting."""
    write_files(
        tmp_path,
        {
            "config.json": {"model_type": "llama", "quantization_config": GPTQ},
            "model.safetensors": {},
        },
    )
    path = json.dumps(str(tmp_path))
    config = "backends: {{own: {{kind: torch, path: {}, {}}}}}\nmodels: {{m: {{backend: own}}}}\n"
    load_text(config.format(path, "dtype: auto"), "<test>", env={})
    with pytest.raises(ConfigError, match=text):
        load_text(config.format(path, setting), "<test>", env={})


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}},
        {"config.json": {"architectures": ["XForCausalLM"], "vision_config": {}}},
        {"config.json": TEXT_HALF},
        {"config.json": {"model_type": "llama"}, **ADAPTER},
    ],
    ids=["text", "text part of a model of images", "text half", "merged adapter"],
)
def test_other_files_are_accepted(tmp_path: Path, files: dict[str, Any]) -> None:
    assert find_model(str(write_files(tmp_path, files)), print).task == "generate"


def test_package_that_is_not_installed_here_is_no_error_of_the_configuration() -> None:
    config = (
        "backends: {own: {kind: torch, path: 'package:elsewhere'}}\nmodels: {m: {backend: own}}"
    )

    assert load_text(config, "<test>", env={}).models.keys() == {"m"}

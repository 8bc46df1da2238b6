"""Adapters, quantized weights and models of images are refused by name, at check and at load."""

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
VISION = {
    "config.json": {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {},
        "audio_config": {},
    }
}
CASES: list[tuple[dict[str, Any], str]] = [
    (ADAPTER, r"is a LoRA adapter of org/base, .* vLLM \(--enable-lora\) in a pool"),
    ({"adapter_config.json": []}, "is a LoRA adapter, which"),
    (QUANTIZED, "weights quantized by awq, .* vLLM or llama.cpp in a pool"),
    ({"config.json": {"quantization_config": True}}, "quantized by an unknown method"),
    (VISION, "model of vision and audio inputs, .* vLLM or llama.cpp in a pool"),
]


def write_files(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), "utf-8")
    return folder


@pytest.mark.parametrize(("files", "text"), CASES)
def test_files_are_refused_at_load(tmp_path: Path, files: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        find_model(str(write_files(tmp_path, files)), print)


@pytest.mark.parametrize(("files", "text"), CASES)
def test_files_are_refused_at_check(tmp_path: Path, files: dict[str, Any], text: str) -> None:
    write_files(tmp_path, files)
    config = f"backends: {{own: {{kind: torch, path: {json.dumps(str(tmp_path))}}}}}\n"
    with pytest.raises(ConfigError, match=text) as caught:
        load_text(config + "models: {m: {backend: own}}\n", "<test>", env={})

    assert "at backends.own.path" in str(caught.value)


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}},
        {"config.json": {"architectures": ["XForCausalLM"], "vision_config": {}}},
        {"config.json": {"model_type": "llama"}, **ADAPTER},
    ],
    ids=["text", "text part of a model of images", "merged adapter"],
)
def test_other_files_are_accepted(tmp_path: Path, files: dict[str, Any]) -> None:
    assert find_model(str(write_files(tmp_path, files)), print).task == "generate"


def test_package_that_is_not_installed_here_is_no_error_of_the_configuration() -> None:
    config = (
        "backends: {own: {kind: torch, path: 'package:elsewhere'}}\nmodels: {m: {backend: own}}"
    )

    assert load_text(config, "<test>", env={}).models.keys() == {"m"}

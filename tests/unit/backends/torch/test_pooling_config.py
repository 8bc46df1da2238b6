"""The pooling configuration is read from sentence-transformers' files."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from backends.torch.model_files import ModelError
from backends.torch.pooling import (
    DenseLayer,
    PoolingConfig,
    PoolingMode,
    pool_states,
    read_pooling_config,
)

CPU = torch.device("cpu")


def write_model_folder(folder: Path, **files: Any) -> Path:
    for name, content in {"config": {"model_type": "bert"}, **files}.items():
        place = folder / name.replace("__", "/")
        place.parent.mkdir(exist_ok=True)
        place.with_suffix(".json").write_bytes(msgspec.json.encode(content))
    return folder


def make_module(kind: str, path: str = "") -> dict[str, Any]:
    return {"path": path, "type": f"sentence_transformers.models.{kind}"}


def read_pooling(folder: Path, **config: Any) -> PoolingConfig:
    steps = [make_module("Transformer"), make_module("Pooling", "1_Pooling")]
    return read_pooling_config(
        write_model_folder(folder, modules=steps, **{"1_Pooling__config": config})
    )


STATES = torch.tensor([[[1.0, 4.0], [3.0, 2.0], [9.0, 9.0]], [[9.0, 9.0], [3.0, 2.0], [5.0, 8.0]]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("mean", [2.0, 3.0], [4.0, 5.0]),
        ("root", [4 / 2**0.5, 6 / 2**0.5], [8 / 2**0.5, 10 / 2**0.5]),
        ("weighted", [7 / 3, 8 / 3], [21 / 5, 28 / 5]),
        ("cls", [1.0, 4.0], [3.0, 2.0]),
        ("max", [3.0, 4.0], [5.0, 8.0]),
        ("last", [3.0, 2.0], [5.0, 8.0]),
    ],
)
def test_pooling_modes(how: PoolingMode, first: list[float], second: list[float]) -> None:
    """The second row starts with tokens that are not pooled."""
    assert torch.allclose(pool_states(STATES, MASK, how), torch.tensor([first, second]))


def test_default_pooling_without_files(tmp_path: Path) -> None:
    assert read_pooling_config(write_model_folder(tmp_path)) == PoolingConfig()
    write_model_folder(tmp_path, config={"architectures": ["Qwen3ForCausalLM"]})
    assert read_pooling_config(tmp_path) == PoolingConfig(("last",))


def test_pooling_config_is_read_from_the_files(tmp_path: Path) -> None:
    prompts = {"query": "search: ", "document": ""}
    write_model_folder(
        tmp_path,
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers={"prompts": prompts, "default_prompt_name": "query"},
    )
    assert read_pooling(
        tmp_path, pooling_mode_cls_token=True, word_embedding_dimension=4
    ) == PoolingConfig(
        ("cls",),
        normalize=False,
        max_length=256,
        lowercase=True,
        prompts={"query": "search: "},
        default_prompt="query",
    )

    write_model_folder(
        tmp_path,
        modules=[make_module("Transformer"), make_module("Normalize")],
        sentence_bert_config={},
        config_sentence_transformers={"prompts": None},
    )
    assert read_pooling_config(tmp_path) == PoolingConfig()


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, ("last",)),
        ({"pooling_mode_weightedmean_tokens": True}, ("weighted",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode": "lasttoken"}, ("last",)),
        ({"pooling_mode": ["mean_sqrt_len_tokens", "max"]}, ("max", "root")),
    ],
)
def test_pooling_settings_are_read(
    tmp_path: Path, config: dict[str, Any], pooling: tuple[str, ...]
) -> None:
    recipe = read_pooling(tmp_path, **config)
    assert (recipe.modes, recipe.includes_prompt) == (pooling, True)
    assert not read_pooling(tmp_path, include_prompt=False, **config).includes_prompt


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"pooling_mode_median_tokens": True}, "pooling_mode_median_tokens"),
        ({"pooling_mode": "median"}, "unsupported pooling modes: median"),
        ({"pooling_mode_mean_tokens": False}, "unsupported pooling modes: none"),
        ({"pooling_mode": ["mean", 3]}, "unsupported pooling modes: mean, 3"),
    ],
)
def test_unsupported_pooling_mode_is_rejected(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        read_pooling(tmp_path, **config)


def test_unsupported_modules_are_rejected(tmp_path: Path) -> None:
    write_model_folder(
        tmp_path, modules=[make_module("Transformer"), make_module("WeightedLayerPooling")]
    )
    with pytest.raises(ModelError, match="WeightedLayerPooling"):
        read_pooling_config(tmp_path)

    write_model_folder(tmp_path, modules={})
    with pytest.raises(ModelError, match=r"modules\.json can't be read"):
        read_pooling_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, None),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": [64, 128]}, (64, 128)),
    ],
)
def test_matryoshka_sizes_are_read_from_the_config(
    tmp_path: Path, config: dict[str, Any], sizes: tuple[int, ...] | None
) -> None:
    assert (
        read_pooling_config(write_model_folder(tmp_path, config=config)).matryoshka_sizes == sizes
    )


def test_prompt_is_selected_by_name_or_text() -> None:
    recipe = PoolingConfig(prompts={"query": "search: "})
    assert [recipe.get_prompt(one) for one in (None, "query", "find: ")] == [
        "",
        "search: ",
        "find: ",
    ]
    assert PoolingConfig(prompts={"a": "b"}, default_prompt="a").get_prompt(None) == "b"


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("Identity", [5.0, -3.0]),
        ("ReLU", [5.0, 0.0]),
        ("Tanh", [0.9999, -0.9951]),
        ("Sigmoid", [0.9933, 0.0474]),
        ("GELU", [5.0, -0.0040]),
    ],
)
def test_dense_layers_and_activations(
    tmp_path: Path, activation: str, expected: list[float]
) -> None:
    config = {"activation_function": f"torch.nn.modules.activation.{activation}"}
    steps = [
        make_module("Transformer"),
        make_module("Dense", "2_Dense"),
        make_module("Dense", "3_Dense"),
    ]
    write_model_folder(tmp_path, modules=steps)
    write_model_folder(tmp_path, **{"2_Dense__config": config, "3_Dense__config": {"bias": False}})

    with pytest.raises(ModelError, match="safetensors weights"):
        read_pooling_config(tmp_path)

    weights = {"linear.weight": torch.tensor([[1.0, 1.0], [-1.0, 0.0]])}
    save_file(weights, tmp_path / "3_Dense" / "model.safetensors")
    weights["linear.bias"] = torch.tensor([1.0, -1.0])
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")

    first, second = (DenseLayer(dense, CPU) for dense in read_pooling_config(tmp_path).dense)
    vector = torch.tensor([[2.0, 2.0]])
    assert torch.allclose(first(vector), torch.tensor([expected]), atol=1e-4)
    assert torch.allclose(second(vector), torch.tensor([[4.0, -2.0]]).tanh())
    assert first.output_size == 2


def test_unsupported_activation_is_rejected(tmp_path: Path) -> None:
    steps = [make_module("Transformer"), make_module("Dense", "2_Dense")]
    config = {"activation_function": "torch.nn.modules.Mystery"}
    write_model_folder(tmp_path, modules=steps, **{"2_Dense__config": config})

    save_file({"linear.weight": torch.zeros(1, 1)}, tmp_path / "2_Dense" / "model.safetensors")

    with pytest.raises(ModelError, match="Mystery"):
        read_pooling_config(tmp_path)

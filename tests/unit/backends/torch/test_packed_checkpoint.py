"""GPTQ, AWQ and compressed-tensors checkpoints: read exactly, kept in about their size."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from backends.torch import loader
from backends.torch.attention import BatchSegment
from backends.torch.kv_cache import BlockPool, SequenceCache
from backends.torch.linear_layers import PrepackedLinear
from backends.torch.loader import ModelLocation, find_model, load_quantized_model
from backends.torch.model import ModelRunner, load_model_runner
from backends.torch.model_files import ModelError, UnsupportedModelError, estimate_memory
from backends.torch.packed_checkpoint import repack_layer
from backends.torch.packed_formats import (
    PackedFormat,
    UnknownQuantizationError,
    read_packed_format,
)
from backends.torch.quantized_weights import (
    EightBitLinear,
    FourBitLinear,
    PackedEightBitLinear,
    PackedFourBitLinear,
    QuantizedLinear,
)

OUTPUTS, INPUTS = 96, 512
PROMPT = list(range(40, 90))


def pack_words(codes: Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """The codes of a row in int32 words; ``order``: which has the lowest bits, and so on."""
    groups = codes.long().reshape(len(codes), -1, 32 // bits)[..., list(order)[: 32 // bits]]
    words = (groups << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def pack_gptq(codes: Tensor, scales: Tensor, zeros: Tensor, offset: int = 1) -> dict[str, Tensor]:
    """``codes`` (outputs, inputs), ``scales`` and ``zeros`` (outputs, groups)."""
    inputs, groups = codes.shape[1], scales.shape[1]
    return {
        "qweight": pack_words(codes).t(),
        "qzeros": pack_words(zeros.t() - offset),
        "scales": scales.t().half(),
        "g_idx": (torch.arange(inputs) // (inputs // groups)).int(),
    }


def pack_gptq_v2(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return pack_gptq(codes, scales, zeros, 0)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_awq(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {
        "qweight": pack_words(codes.t(), AWQ_ORDER),
        "qzeros": pack_words(zeros.t(), AWQ_ORDER),
        "scales": scales.t().half(),
    }


def pack_compressed(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {
        "weight_packed": pack_words(codes),
        "weight_scale": scales.half(),
        "weight_zero_point": pack_words(zeros.t()).t(),
        "weight_shape": torch.tensor(codes.shape),
    }


def pack_symmetric(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    tensors = pack_compressed(codes, scales, zeros)
    del tensors["weight_zero_point"]
    return tensors


def pack_gptq_bytes(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    tensors = pack_gptq(codes, scales, zeros)
    return tensors | {
        "qweight": pack_words(codes, bits=8).t(),
        "qzeros": pack_words(zeros.t() - 1, bits=8),
    }


def pack_words_of_bytes(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return pack_symmetric(codes, scales, zeros) | {"weight_packed": pack_words(codes, bits=8)}


def pack_signed_bytes(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {
        "weight": (codes - 128).to(torch.int8),
        "weight_scale": scales.bfloat16(),
        "weight_zero_point": (zeros - 128).to(torch.int8),
    }


def pack_symmetric_bytes(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    tensors = pack_signed_bytes(codes, scales, zeros)
    del tensors["weight_zero_point"]
    return tensors


Packer = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
}  # fmt: skip


def make_compressed(kind: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """The configuration that llm-compressor writes, with these fields of its weights."""
    values = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True,
        "actorder": None, **weights,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": values, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


WHOLE_ROWS: dict[str, Any] = {"num_bits": 8, "strategy": "channel", "group_size": None}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
"""Activations that are quantized while they are computed (W8A8)."""


def with_activations(config: dict[str, Any], activations: Any) -> dict[str, Any]:
    group = config["config_groups"]["group_0"] | {"input_activations": activations}
    return config | {"config_groups": {"group_0": group}}


FORMATS: dict[str, tuple[dict[str, Any], Packer]] = {
    "gptq": (GPTQ, pack_gptq),
    "gptq in groups of 32": (GPTQ | {"group_size": 32}, pack_gptq),
    "gptq of whole rows": (GPTQ | {"group_size": -1}, pack_gptq),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, pack_gptq_v2),
    "awq": (AWQ, pack_awq),
    "awq in groups of 64": (AWQ | {"group_size": 64}, pack_awq),
    "compressed-tensors": (make_compressed(), pack_symmetric),
    "compressed-tensors with zero points": (make_compressed(symmetric=False), pack_compressed),
    "compressed-tensors of whole rows": (
        make_compressed(strategy="channel", group_size=None), pack_symmetric,
    ),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, pack_gptq_bytes),
    "gptq, 8 bits, whole rows": (GPTQ | {"bits": 8, "group_size": -1}, pack_gptq_bytes),
    "compressed-tensors, 8 bits": (make_compressed(num_bits=8), pack_words_of_bytes),
    "compressed-tensors, 8 bits, whole rows": (make_compressed(**WHOLE_ROWS), pack_words_of_bytes),
    "int-quantized": (make_compressed("int-quantized", **WHOLE_ROWS), pack_symmetric_bytes),
    "int-quantized with zero points": (
        make_compressed("int-quantized", symmetric=False, **WHOLE_ROWS), pack_signed_bytes,
    ),
    "int-quantized with activations": (
        with_activations(make_compressed("int-quantized", **WHOLE_ROWS), DYNAMIC),
        pack_symmetric_bytes,
    ),
}  # fmt: skip


def make_weights(
    shape: Sequence[int], layout: PackedFormat, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes, scales and zero points of a format."""
    dice = torch.Generator().manual_seed(seed)
    outputs, inputs = shape
    groups = 1 if layout.group_size < 0 else inputs // layout.group_size
    limit = 1 << layout.bits
    codes = torch.randint(0, limit, (outputs, inputs), generator=dice)
    scales = torch.rand((outputs, groups), generator=dice) * 0.01 + 0.001
    if layout.method == "int-quantized":
        scales = scales.bfloat16()
    zeros = torch.randint(1, limit, (outputs, groups), generator=dice)
    zeros = zeros if layout.has_zero_points else torch.full_like(zeros, layout.center)
    return codes, scales.half().float(), zeros


def compute_bound(weights: Tensor, scales: Tensor, layout: PackedFormat) -> Tensor:
    """How far a weight may be from the file's: 1/16 of a step, or 1/128 of the largest of a row."""
    steps = scales.repeat_interleave(INPUTS // scales.shape[1], 1)
    largest = weights.abs().amax(1, keepdim=True)
    return steps / 16 if layout.bits == 4 else (largest / 128).expand_as(weights)


def make_layer(tensors: Mapping[str, Tensor], layout: PackedFormat) -> QuantizedLinear:
    kind = FourBitLinear if layout.bits == 4 else EightBitLinear
    return kind(*repack_layer(tensors, layout, torch.Size((OUTPUTS, INPUTS))))


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups = codes.view(len(codes), scales.shape[1], -1)
    return ((groups - zeros[..., None]) * scales[..., None]).flatten(1)


@pytest.mark.parametrize("name", FORMATS)
def test_layer_has_the_weights_of_the_file_in_their_size(name: str) -> None:
    config, pack = FORMATS[name]
    layout = read_packed_format(config)
    codes, scales, zeros = make_weights((OUTPUTS, INPUTS), layout)
    tensors, expected = pack(codes, scales, zeros), dequantize(codes, scales, zeros)

    layer = make_layer(tensors, layout)

    assert ((layer.dequantize() - expected).abs() <= compute_bound(expected, scales, layout)).all()
    stored = sum(one.nbytes for kind, one in tensors.items() if kind != "g_idx")
    assert layer.codes.nbytes + layer.scales.nbytes <= 1.15 * stored


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_dequantized_weights(name: str) -> None:
    config, pack = FORMATS[name]
    layout = read_packed_format(config)
    parts = make_weights((OUTPUTS, INPUTS), layout)
    weights = dequantize(*parts)
    layer = make_layer(pack(*parts), layout).pack()
    inputs = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(1))
    # Beside the weights' own error, activations, scales and results are in bfloat16.
    errors = weights.abs() / 128 + 2 * compute_bound(weights, parts[1], layout)
    bound = inputs.abs() @ errors.t()
    assert ((layer(inputs) - inputs @ weights.t()).abs() <= bound).all()


REFUSED: list[tuple[dict[str, Any], str]] = [
    (GPTQ | {"bits": 3}, "bits is 3"),
    (GPTQ | {"bits": "4"}, "bits is 4"),
    (GPTQ | {"desc_act": True}, "desc_act is True"),
    (GPTQ | {"group_size": 100}, "group_size is 100"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is marlin"),
    (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic is"),
    (AWQ | {"version": "gemv"}, "version is gemv"),
    (AWQ | {"zero_point": False}, "zero_point is False"),
    ({"quant_method": "awq"}, "bits is missing"),
    ({"quant_method": "fp8"}, "quant_method is fp8"),
    ({"bits": 4}, "quant_method is missing"),
    (make_compressed(num_bits=6), "num_bits is 6"),
    (make_compressed("int-quantized"), "num_bits is 4"),
    (with_activations(make_compressed(), DYNAMIC | {"dynamic": False}), "dynamic is False"),
    (with_activations(make_compressed(), DYNAMIC | {"type": "float"}), "type is float"),
    (with_activations(make_compressed(), DYNAMIC | {"num_bits": 4}), "num_bits is 4"),
    (with_activations(make_compressed(), True), "input_activations is no object"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quant_method is bitsandbytes"),
    (make_compressed(type="float"), "type is float"),
    (make_compressed(strategy="tensor"), "strategy is tensor"),
    (make_compressed(actorder="group"), "actorder is group"),
    (make_compressed() | {"format": "float-quantized"}, "format is float-quantized"),
    (make_compressed() | {"format": "int-quantized"}, "num_bits is 4"),
    (make_compressed() | {"config_groups": {}}, "config_groups is not one group"),
    (make_compressed() | {"config_groups": {"a": 1}}, "config_groups has no weights"),
]


@pytest.mark.parametrize(("config", "text"), REFUSED)
def test_formats_that_are_not_read_are_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UnknownQuantizationError, match=text):
        read_packed_format(config)


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("g_idx", lambda one: one.flip(0), "inputs are in another order"),
        ("scales", lambda one: one[1:], "scales have shape"),
        ("qweight", lambda one: one[1:], "codes have shape"),
        ("qweight", lambda one: one.long(), "packed codes are torch.int64"),
        ("qzeros", lambda one: one * 0 - 1, "zero point of 16 is ambiguous"),
        ("qzeros", lambda one: one[:, :3], "zero points have shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    kind: str, change: Callable[[Tensor], Tensor], text: str
) -> None:
    layout = read_packed_format(GPTQ)
    tensors = pack_gptq(*make_weights((OUTPUTS, INPUTS), layout))
    tensors[kind] = change(tensors[kind])
    with pytest.raises(ValueError, match=text):
        repack_layer(tensors, layout, torch.Size((OUTPUTS, INPUTS)))


# --- whole models ---------------------------------------------------------------------------------


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    llama: Any = LlamaForCausalLM
    return llama(config).eval()


def write_checkpoint(folder: Path, name: str) -> Mapping[str, Tensor]:
    """Write a tiny model whose layers are in a format; returns their dequantized weights."""
    config, pack = FORMATS[name]
    layout = read_packed_format(config)
    model = make_model()
    tensors: dict[str, Tensor] = {}
    expected = dict(model.state_dict())
    for layer, module in model.named_modules():
        if isinstance(module, nn.Linear) and layer != "lm_head":
            parts = make_weights(module.weight.shape, layout, len(tensors))
            factor = 4 if layout.bits == 4 else 16
            expected[f"{layer}.weight"] = dequantize(*parts) / factor
            packed = pack(parts[0], parts[1] / factor, parts[2])
            tensors |= {f"{layer}.{kind}": one for kind, one in packed.items()}
    floats = {key: one.half() for key, one in model.state_dict().items() if "_proj" not in key}
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    tensors = {key: one.contiguous() for key, one in (tensors | floats).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return expected


def compute_logits(runner: ModelRunner) -> Tensor:
    cache = SequenceCache(BlockPool(16), len(PROMPT))
    return runner([BatchSegment(cache, PROMPT, len(PROMPT))])


def load(folder: Path, dtype: str = "auto") -> ModelRunner:
    location = find_model(str(folder), print)
    assert location == ModelLocation(str(folder), "generate", is_quantized=True)
    return load_model_runner(location, "cpu", dtype, None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gptq", PackedFourBitLinear),
        ("awq", PackedFourBitLinear),
        ("compressed-tensors with zero points", PackedFourBitLinear),
        ("gptq, 8 bits", PackedEightBitLinear),
        ("compressed-tensors, 8 bits", PackedEightBitLinear),
        ("int-quantized with activations", PackedEightBitLinear),
    ],
)
def test_model_computes_nearly_what_its_dequantized_weights_do(
    tmp_path: Path, name: str, kind: type
) -> None:
    weights = write_checkpoint(tmp_path, name)
    exact = make_model()
    exact.load_state_dict(weights)
    runner = load(tmp_path)

    with torch.inference_mode():
        expected = exact(torch.tensor([PROMPT])).logits[0]
    assert torch.cosine_similarity(compute_logits(runner), expected).min() > 0.999
    kinds = [type(one) for one in runner._model.modules()]
    assert kinds.count(kind) == 4 * runner.config.num_hidden_layers


def update_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], *, without: Sequence[str] = (), **config: Any
) -> None:
    """Write these tensors and fields of config.json over those of a checkpoint."""
    file = folder / "model.safetensors"
    merged = {key: one for key, one in load_file(file).items() if key not in without}
    save_file(merged | dict(tensors), file, metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.mark.parametrize("has_own", [True, False])
def test_output_layer_is_tied_only_if_the_file_has_none(tmp_path: Path, has_own: bool) -> None:
    """Given ``tie_word_embeddings``, an output layer in the file is the one that computes."""
    weights = dict(write_checkpoint(tmp_path, "gptq"))
    without = () if has_own else ("lm_head.weight",)
    update_checkpoint(tmp_path, {}, without=without, tie_word_embeddings=True)
    if not has_own:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    exact = make_model()
    exact.load_state_dict(weights)

    with torch.inference_mode():
        expected = exact(torch.tensor([PROMPT])).logits[0]
    assert torch.cosine_similarity(compute_logits(load(tmp_path)), expected).min() > 0.999


def test_memory_is_estimated_and_checked_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given float16 embeddings that become float32, the estimate is at least what is loaded."""
    write_checkpoint(tmp_path, "gptq")
    required = estimate_memory(str(tmp_path), "auto", "cpu")
    model = load_quantized_model(find_model(str(tmp_path), print))
    tensors = [*model.parameters(), *(one for _, one in model.named_buffers())]
    layers = [one for one in model.modules() if isinstance(one, FourBitLinear)]
    taken = sum(one.nbytes for one in tensors)
    taken += sum(one.codes.nbytes + one.scales.nbytes for one in layers)
    output = model.get_output_embeddings()  # prepacked: it would take its memory twice later
    assert isinstance(output, PrepackedLinear)
    taken += output._weight.numel() * torch.float32.itemsize
    assert taken <= required <= 1.2 * taken

    monkeypatch.setattr(loader, "get_free_memory", lambda _: required - 1)
    with pytest.raises(ModelError, match="MB are free"):
        load(tmp_path)
    monkeypatch.setattr(loader, "get_free_memory", lambda _: required)
    assert compute_logits(load(tmp_path)).isfinite().all()


@pytest.mark.parametrize("quantization", [None, {}])
def test_empty_quantization_config_is_none(tmp_path: Path, quantization: Any) -> None:
    """Given float weights, an empty ``quantization_config`` changes neither format nor task."""
    model = make_model()
    model.save_pretrained(tmp_path)
    update_checkpoint(tmp_path, {}, quantization_config=quantization)

    location = find_model(str(tmp_path), print)
    assert not location.is_quantized
    assert find_model(str(tmp_path), print, "embed").task == "embed"
    runner = load_model_runner(location, "cpu", "float32", None)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(compute_logits(runner), expected)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
)
def test_tensors_that_transformers_ignores_are_ignored(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, "gptq")
    expected = compute_logits(load(tmp_path))
    update_checkpoint(tmp_path, {name: torch.ones(16)})
    assert torch.equal(compute_logits(load(tmp_path)), expected)


@pytest.mark.parametrize("kind", ["qweight", "qzeros", "scales"])
def test_missing_part_of_a_layer_is_named(tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path, "gptq")
    name = f"model.layers.0.self_attn.q_proj.{kind}"
    update_checkpoint(tmp_path, {}, without=[name])
    with pytest.raises(ModelError, match=f"{name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["gptq", "gptq, 8 bits", "compressed-tensors"])
def test_layer_with_float_and_quantized_weights_is_refused(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, name)
    layer = "model.layers.0.mlp.up_proj"
    update_checkpoint(tmp_path, {f"{layer}.weight": torch.zeros(256, 128)})
    with pytest.raises(ModelError, match=f"{layer} has both weight and (qweight|weight_packed)"):
        load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "kind"), [("gptq", "scales"), ("gptq, 8 bits", "scales"), ("awq", "scales"),
                       ("compressed-tensors", "weight_scale"), ("int-quantized", "weight_scale")]
)  # fmt: skip
def test_scales_that_are_no_numbers_are_refused(
    tmp_path: Path, name: str, kind: str, value: float
) -> None:
    write_checkpoint(tmp_path, name)
    layer = "model.layers.1.mlp.up_proj"
    scales = load_file(tmp_path / "model.safetensors")[f"{layer}.{kind}"]
    scales.view(-1)[3] = value
    update_checkpoint(tmp_path, {f"{layer}.{kind}": scales})
    with pytest.raises(ModelError, match=f"{layer} has weights or scales that are infinite or no"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(256, 128), "codes are torch.float32, not int8"),
        (torch.zeros(256, 64, dtype=torch.int8), "codes have shape"),
    ],
)
def test_signed_codes_that_do_not_fit_are_refused(
    tmp_path: Path, tensor: Tensor, text: str
) -> None:
    write_checkpoint(tmp_path, "int-quantized")
    layer = "model.layers.0.mlp.up_proj"
    update_checkpoint(tmp_path, {f"{layer}.weight": tensor})
    with pytest.raises(ModelError, match=f"weights of {layer} can't be read: {text}"):
        load(tmp_path)


def test_end_tokens_and_sampling_of_the_folder_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gptq")
    content = {"eos_token_id": [7, 9], "do_sample": True, "temperature": 0.25}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    generation_config = load(tmp_path).generation_config
    assert generation_config.eos_token_id == [7, 9]
    assert generation_config.temperature == 0.25


@pytest.mark.parametrize("dtype", ["int8", "float32", "bfloat16"])
def test_quantized_weights_have_no_other_format(tmp_path: Path, dtype: str) -> None:
    write_checkpoint(tmp_path, "gptq")
    with pytest.raises(ModelError, match="stay quantized: set dtype: auto"):
        load(tmp_path, dtype)


def test_quantized_weights_serve_no_embeddings(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gptq")
    with pytest.raises(ModelError, match="only read for text generation"):
        find_model(str(tmp_path), print, "embed")


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("model.extra.weight", torch.ones(3), "has no such part"),
        ("model.norm.weight", torch.ones(3), r"shape \(3,\), not \(128,\)"),
        ("model.layers.0.mlp.up_proj.bias", torch.ones(3), r"bias has shape \(3,\), not \(256,\)"),
        ("model.norm.qweight", torch.ones(3, dtype=torch.int32), "is quantized and no linear"),
        ("model.experts.qweight", torch.ones(3, dtype=torch.int32), "experts can't be read"),
        ("model.norm.weight", torch.ones(3, dtype=torch.int8), "unknown type torch.int8"),
    ],
)
def test_tensors_that_the_model_has_not_are_refused(
    tmp_path: Path, name: str, tensor: Tensor, text: str
) -> None:
    write_checkpoint(tmp_path, "gptq")
    update_checkpoint(tmp_path, {name: tensor})
    with pytest.raises(ModelError, match=text):
        load(tmp_path)


def test_unknown_quantization_is_refused_at_check(tmp_path: Path) -> None:
    content = {"model_type": "llama", "quantization_config": GPTQ | {"bits": 3}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match=r"gptq, which .* \(bits is 3\): .* vLLM"):
        find_model(str(tmp_path), print)

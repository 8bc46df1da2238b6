"""What is said of a local model's weights, in its files, its log, its listings and commands."""

import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from backends.torch.engine_client import EngineProcess
from backends.torch.ipc import IPC_VERSION, ReadyEvent
from backends.torch.settings import TorchSettings
from backends.torch.weight_summary import summarize_weights
from protocols.core.catalog import ModelFeatures, ModelWeights
from tests.integration.torch.tiny_gguf import write_gguf
from tests.support.tiny_model import tiny_llama
from tests.unit.backends.torch.test_packed_checkpoint import write_checkpoint

TINY_WEIGHTS = sum(one.numel() for one in tiny_llama().parameters())


def test_summary_of_safetensors_counts_the_weights(tiny_folder: Path) -> None:
    size = (tiny_folder / "model.safetensors").stat().st_size
    expected = ModelWeights("safetensors", "llama", TINY_WEIGHTS, "F32", size)
    assert summarize_weights(str(tiny_folder)) == expected
    assert summarize_weights("owner/of-the-hub", tiny_folder) == expected


def test_summary_of_a_gguf_file_is_that_of_its_header(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    size = file.stat().st_size
    assert summarize_weights(str(file)) == ModelWeights(
        "gguf", "llama", TINY_WEIGHTS, "unknown", size
    )
    assert [gguf.LlamaFileType(i).name for i in (3, 15, 18)] == [
        "MOSTLY_Q4_1", "MOSTLY_Q4_K_M", "MOSTLY_Q6_K"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gptq", "gptq 4-bit"),
        ("awq", "awq 4-bit"),
        ("gptq, 8 bits", "gptq 8-bit"),
        ("compressed-tensors", "compressed-tensors 4-bit"),
    ],
)
def test_summary_of_packed_weights_counts_codes_and_no_scales(
    tmp_path: Path, name: str, kind: str
) -> None:
    parameters = sum(one.numel() for one in write_checkpoint(tmp_path, name).values())
    summary = summarize_weights(str(tmp_path))
    assert summary is not None
    assert (summary.parameters, summary.quantization) == (parameters, kind)


@pytest.mark.parametrize("break_file", [lambda data: data[:100], lambda data: data[:3000]])
def test_damaged_file_has_no_summary(tmp_path: Path, break_file: Callable[[bytes], bytes]) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    file.write_bytes(break_file(file.read_bytes()))
    assert summarize_weights(str(file)) is None
    assert summarize_weights("owner/of-the-hub") is None


WEIGHTS = ModelWeights("gguf", "llama", 134_515_008, "Q4_1", 98_362_432)
FEATURES = ModelFeatures(chat=True, problem="no marks", context_length=512, weights=WEIGHTS)


def test_log_tells_what_every_view_tells(caplog: pytest.LogCaptureFixture) -> None:
    """Chat, tools, reasoning, schema, context and weights; and why calls are not understood."""
    process = EngineProcess(TorchSettings(path="owner/model"))
    with caplog.at_level(logging.INFO):
        process._handle_event(ReadyEvent("generate", IPC_VERSION, 512, "cpu", features=FEATURES))
    for subject, text in FEATURES.describe():
        assert f"{subject}: {text}" in caplog.text
    assert "weights: llama, 134.5 million parameters, Q4_1, 98 MB of gguf" in caplog.text
    assert [one.levelname for one in caplog.records].count("WARNING") == 1


def test_log_of_a_model_that_generates_no_text_warns_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = EngineProcess(TorchSettings(path="owner/model"))
    features = ModelFeatures(task="embedding", context_length=512)
    with caplog.at_level(logging.INFO):
        process._handle_event(ReadyEvent("embed", IPC_VERSION, 512, "cpu", features=features))
    assert "task: embedding; context: 512 tokens; weights: unknown" in caplog.text
    assert "WARNING" not in caplog.text

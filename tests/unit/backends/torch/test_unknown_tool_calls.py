"""A model with an unknown tool call format rejects tools, or serves them with a loss."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from backends.torch.backend import TorchBackend
from backends.torch.ipc import (
    ChatTurn,
    EngineSamplingParams,
    FunctionChoice,
    FunctionDefinition,
    GenerateCommand,
    PromptInput,
    StopParams,
    ToolCallEvent,
)
from backends.torch.weight_summary import summarize_weights
from gateway.cli import main
from protocols.core.catalog import ModelFeatures

Drive = Callable[..., Any]
UNKNOWN = (
    "x{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}{% endfor %}"
)


def run(
    scripted: Drive, choice: FunctionChoice | None, *, serves: bool, strict: bool = False
) -> Any:
    """Run a model that writes text; its template has functions and an unknown call format."""
    driver, runner = scripted("CALL f")
    manager = driver.engine._grammar_manager
    tokenizer = copy.deepcopy(manager._tokenizer)
    tokenizer.chat_template = UNKNOWN
    reader = manager._input_processor
    manager._tokenizer = reader._tokenizer = tokenizer
    reader.serves_unknown_calls = serves
    function = FunctionDefinition("f", strict=strict)
    functions = (function,) if choice is not None else ()
    prompt_input = PromptInput(turns=(ChatTurn("user", "x"),), functions=functions)
    (ids,) = reader.tokenize_prompts(prompt_input, StopParams())
    runner.prompt = runner._prompt = len(ids)
    greedy, ending = EngineSamplingParams(temperature=0), StopParams(max_tokens=20)
    return driver.run(GenerateCommand(1, prompt_input, greedy, ending, function_choice=choice))


@pytest.mark.parametrize("required", [False, True])
def test_tools_are_refused_with_the_reason(scripted: Drive, *, required: bool) -> None:
    failed = run(scripted, FunctionChoice(("f",), required=required), serves=False).failed()
    assert (failed.kind, failed.param) == ("unsupported", "tools")
    assert "writes tool calls in a format that is not known" in failed.message
    assert "tool_choice must be none" in failed.message


def test_a_request_without_tools_is_served(scripted: Drive) -> None:
    assert run(scripted, None, serves=False).text() == "CALL f"


def test_tools_are_served_as_text_by_configuration(scripted: Drive) -> None:
    driver = run(scripted, FunctionChoice(("f",)), serves=True)
    assert (driver.text(), driver.select(ToolCallEvent)) == ("CALL f", [])

    for choice, strict in (
        (FunctionChoice(("f",), required=True), False),
        (FunctionChoice(("f",)), True),
    ):
        failed = run(scripted, choice, serves=True, strict=strict).failed()
        assert (failed.kind, failed.param) == ("unsupported", "tools")


def test_calls_as_text_are_reported_as_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    from protocols.core.request import GenerationRequest, Message, TextPart, Tool  # noqa: PLC0415

    message = Message("user", (TextPart("x"),))
    chat_request = GenerationRequest(
        model="m", kind="chat", messages=(message,), tools=(Tool("f"),)
    )
    backend = TorchBackend(path="x")
    request: Any = type("Request", (), {"decode": lambda self: (self.value, {})})
    for value, features, expected in (
        (chat_request, ModelFeatures(chat=True, problem="no format"), ["tools"]),
        (chat_request, ModelFeatures(chat=True, tool_calls="Hermes"), []),
        (GenerationRequest(model="m", kind="chat"), ModelFeatures(problem="none"), []),
        (chat_request, None, []),
    ):
        monkeypatch.setattr(TorchBackend, "features", features)
        backend_request = request()
        backend_request.value = value
        assert [
            one.path for one in backend.prepare(backend_request).unsupported_parameters
        ] == expected


def write_config(folder: Path, model: Path, **settings: Any) -> str:
    file = folder / "gateway.yaml"
    config = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
        "backends": {"local": {"kind": "torch", "path": str(model), **settings}},
        "models": {"m": {"backend": "local"}},
    }
    file.write_text(json.dumps(config), "utf-8")
    return str(file)


def test_command_shows_the_detected_features(tiny_folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["models", "show", write_config(tmp_path, tiny_folder), "m"])
    assert result.exit_code == 0, result.output
    assert "tool calls: Hermes (found by: system message)" in result.output
    assert "reasoning: none" in result.output
    assert "schema: enforced by a grammar" in result.output
    assert "context: 128 tokens" in result.output


def test_check_shows_the_same_as_the_command(tiny_folder: Path, tmp_path: Path) -> None:
    file = write_config(tmp_path, tiny_folder)
    shown = CliRunner().invoke(main, ["models", "show", file, "m"])
    checked = CliRunner().invoke(main, ["check", file, "--model", "m"])
    assert (shown.exit_code, checked.exit_code) == (0, 0)
    assert checked.output.endswith(shown.output)
    listed = CliRunner().invoke(main, ["check", file, "--model", "m", "--json"])
    shown = CliRunner().invoke(main, ["models", "show", file, "m", "--json"])
    features = json.loads(listed.output)["models"]["local"]
    assert {"backend": "local", **features} == json.loads(shown.output)


def test_command_shows_why_calls_are_not_understood(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = UNKNOWN
    target = tmp_path / "model"
    tokenizer.save_pretrained(target)
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((tiny_folder / name).read_bytes())
    for name in ("m", "local"):
        arguments = ["models", "show", write_config(tmp_path, target), name, "--json"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 1, result.output
        shown = json.loads(result.output)
        assert "in a format that is not known" in shown["problem"]
        assert "tool_calls" not in shown


def test_command_shows_the_task_of_a_model_that_generates_no_text(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Nothing is said of chat, tools or prompt lookup, and nothing is wrong."""
    weights = summarize_weights(str(tiny_folder))
    assert weights is not None
    file = write_config(tmp_path, tiny_folder, task="embedding", context=64)
    result = CliRunner().invoke(main, ["models", "show", file, "m"])
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"local: {tiny_folder}",
        "  task: embedding",
        "  context: 64 tokens",
        f"  weights: {weights.describe()}",
    ]
    shown = CliRunner().invoke(main, ["models", "show", file, "m", "--json"])
    assert json.loads(shown.output) == {
        "backend": "local",
        "task": "embedding",
        "context_length": 64,
        "weights": msgspec.to_builtins(weights),
    }


def test_command_names_each_problem(tiny_folder: Path, tmp_path: Path) -> None:
    file = write_config(tmp_path, tiny_folder)
    for arguments, text in (
        ([file, "other"], "is no model or backend"),
        (["nowhere.yaml", "m"], "can't be read"),
    ):
        result = CliRunner().invoke(main, ["models", "show", *arguments])
        assert result.exit_code == 2
        assert text in result.output

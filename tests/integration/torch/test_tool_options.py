"""A local model's tool calls reach clients as tool calls, with the options that SDKs send."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from backends.torch.call_formats import CALL_FORMATS, CallFormat
from backends.torch.ipc import FunctionCall
from tests.conftest import Serve
from tests.support.tiny_model import EOS, byte_tokenizer

NAMED = ("Granite 3", "gpt-oss", "Qwen3-Coder")
OTHERS = ("DeepSeek V3.1", "Kimi K2", "MiniMax M2", "Phi-4", "Phi-4-mini", "Gemma 4", "LFM2")
FAMILIES = [
    pytest.param(one, id=one.family, marks=() if one.family in NAMED else pytest.mark.slow)
    for one in CALL_FORMATS
    if one.family in (*NAMED, *OTHERS)
]
ARGUMENTS = {"city": "Rome", "days": 2, "note": "12345"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "enum": [1, 2, 3]},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}


def write_scripted_model(folder: Path, script: str, template: str) -> None:
    """Write a model that generates a script after a prompt of one token.

    Its layers are zero, so that the position alone determines the next token.
    """
    tokens = [*script.encode(), EOS]
    size = 448
    config = GPT2Config(
        vocab_size=259, n_positions=size, n_embd=size, n_layer=1, n_head=1,
        tie_word_embeddings=False, eos_token_id=EOS, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.weight.fill_(1.0)
        model.transformer.wpe.weight.copy_(torch.eye(size))
        for position in range(size):
            token = tokens[position] if position < len(tokens) else EOS
            model.lm_head.weight[token, position] = 2.0
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def make_tools(*, strict: bool) -> Any:
    function = {"name": "weather", "parameters": PARAMETERS, "strict": strict}
    return [{"type": "function", "function": function}]


OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {"tools": make_tools(strict=False)},
    "strict": {"tools": make_tools(strict=True)},
    "parallel": {"tools": make_tools(strict=False), "parallel_tool_calls": False},
    "required": {"tools": make_tools(strict=True), "tool_choice": "required"},
    "named": {
        "tools": make_tools(strict=False),
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
}


@pytest.mark.parametrize("call_format", FAMILIES)
async def test_calls_arrive_as_calls_under_every_option(
    serve: Serve, tmp_path: Path, call_format: CallFormat
) -> None:
    """The model writes a call in its family's own format."""
    script = call_format.format_calls([FunctionCall("", "weather", json.dumps(ARGUMENTS))])
    template = f"x{{# tools {call_format.template_sign} #}}"
    write_scripted_model(tmp_path / "model", script, template)
    config = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
        "backends": {"local": {"kind": "torch", "path": str(tmp_path / "model"), "threads": 1}},
        "models": {"m": {"backend": "local"}},
    }
    gateway = await serve(json.dumps(config))
    messages: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as client:
        for option, fields in OPTIONS.items():
            response = await client.chat.completions.create(
                model="m", messages=messages, temperature=0, max_tokens=440, **fields
            )
            [choice] = response.choices
            calls: Any = choice.message.tool_calls
            assert calls, (option, choice.message.content)
            assert json.loads(calls[0].function.arguments) == ARGUMENTS, option
            assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", ""), (
                option
            )
        streamed = await client.chat.completions.create(
            model="m", messages=messages, temperature=0, max_tokens=440, stream=True,
            **OPTIONS["strict"],
        )  # fmt: skip
        deltas = [one.choices[0].delta async for one in streamed if one.choices]
        pieces = [call.function for delta in deltas for call in delta.tool_calls or []]

        text = "".join((one.arguments or "") for one in pieces if one is not None)

        assert json.loads(text) == ARGUMENTS
        assert not "".join(delta.content or "" for delta in deltas)


ENDING: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"days": {"type": "integer", "enum": [1, 2, 3]}},
                "required": ["days"],
                "additionalProperties": False,
            },
        },
    }
]


WITHOUT_REASONING = [one for one in FAMILIES if one.id != "gpt-oss"]
"""gpt-oss may reason before a call, and a model that writes text only would reason to the end."""


@pytest.mark.parametrize("call_format", WITHOUT_REASONING)
async def test_model_that_would_write_text_calls_a_required_function(
    serve: Serve, tmp_path: Path, call_format: CallFormat
) -> None:
    """Given a model that writes text only, a required call is enforced in its family's format."""
    template = f"x{{# tools {call_format.template_sign} #}}"
    write_scripted_model(tmp_path / "model", "No, I will not call it. " * 16, template)
    config = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
        "backends": {"local": {"kind": "torch", "path": str(tmp_path / "model"), "threads": 1}},
        "models": {"m": {"backend": "local"}},
    }
    gateway = await serve(json.dumps(config))
    messages: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as client:
        choices: Any = ("required", {"type": "function", "function": {"name": "weather"}})
        for tool_choice in choices:
            response = await client.chat.completions.create(
                model="m", messages=messages, temperature=0, max_tokens=440,
                tools=ENDING, tool_choice=tool_choice, parallel_tool_calls=False,
            )  # fmt: skip
            [choice] = response.choices
            calls: Any = choice.message.tool_calls
            [call] = calls
            assert choice.finish_reason == "tool_calls"
            assert json.loads(call.function.arguments)["days"] in {1, 2, 3}


async def test_required_call_of_an_unknown_format_is_refused_by_name(
    serve: Serve, tmp_path: Path
) -> None:
    """Given a template whose format of calls is not known, the error names what it lacks."""
    template = "x{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    write_scripted_model(tmp_path / "model", "No.", template)
    config = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
        "backends": {
            "local": {
                "kind": "torch", "path": str(tmp_path / "model"), "threads": 1,
                "unknown_tool_calls": "text",
            }
        },
        "models": {"m": {"backend": "local"}},
    }  # fmt: skip
    gateway = await serve(json.dumps(config))
    messages: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as client:
        with pytest.raises(openai.BadRequestError, match="tool calls of this model are not") as no:
            await client.chat.completions.create(
                model="m", messages=messages, max_tokens=9, tools=ENDING, tool_choice="required"
            )
    assert no.value.param == "tools"

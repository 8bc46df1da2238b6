"""A model's chat template, for workers that take a prompt as text.

It is read from a tokenizer's folder as transformers writes it (``chat_template.jinja``, or in
``tokenizer_config.json``), or from a template's own file, and runs in Jinja's sandbox with what
such templates expect: messages, tools, the special tokens, ``raise_exception``.
"""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Raw

from protocols.core.errors import InvalidParameter
from protocols.core.request import GenerationRequest, Message, Tool

_MAX_CONFIG_SIZE: Final = 16 << 20
"""Bytes of a tokenizer's description, which may hold thousands of added tokens."""
_CONTINUATION_MARK: Final = "\ue000interlingua\ue000"
"""Stands for the end of what the assistant has said so far."""
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
"""Attributes that every dict has, which come before an item of the same name."""


class ChatTemplate:
    """A Renderer from the template at ``path``, a folder or a file.

    Raises ValueError, saying what is wrong, for a path without a template, and for a template that
    is none.
    """

    def __init__(self, path: str) -> None:
        source, self._special_tokens = _read_template(Path(path))
        self._template = _compile_template(source)
        self._base_context = {**self._template.globals, **self._special_tokens}

    def render_prompt(self, request: GenerationRequest) -> str:
        """See ``protocols.core.interfaces.PromptRenderer``."""
        how = request.templating
        messages = [_convert_message(one) for one in request.messages]
        going_on = bool(how.continue_final)
        if going_on and messages:
            messages[-1]["content"] = f"{request.messages[-1].text}{_CONTINUATION_MARK}"
        opened = how.add_generation_prompt is not False and not going_on
        template, always = self._template, self._base_context
        if how.arguments:
            always = {
                **template.globals,
                **_decode_arguments(how.arguments),
                **self._special_tokens,
            }
        seen = {
            **always,
            "messages": messages,
            "tools": [_convert_tool(one) for one in request.tools] if request.tools else None,
            "add_generation_prompt": opened,
        }
        surroundings = template.environment
        context = surroundings.context_class(surroundings, seen, template.name, template.blocks)
        try:
            text = "".join(template.root_render_func(context))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as e:
            said = str(e)[:300]
            raise InvalidParameter(
                f"the model's chat template refuses these messages: {said}", param="messages"
            ) from None
        return text.partition(_CONTINUATION_MARK)[0] if going_on else text


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which the items of a dict are found without looking for attributes."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See ``SandboxedEnvironment.getattr``, which takes an item where no attribute is."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _compile_template(source: str) -> Template:
    surroundings = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
    )
    surroundings.filters["tojson"] = _to_json
    surroundings.globals["raise_exception"] = _raise_exception
    surroundings.globals["strftime_now"] = _format_now
    try:
        template = surroundings.from_string(source)
    except TemplateError as e:
        raise ValueError(f"holds a chat template that is none: {e}") from None
    template.globals = dict(template.globals)  # from a chain of two, which each prompt would copy
    return template


def _read_template(path: Path) -> tuple[str, dict[str, str]]:
    """The template's text, and the special tokens by name."""
    if path.is_file():
        return path.read_text("utf-8"), {}
    described = _read_json_object(path / "tokenizer_config.json")
    apart = path / "chat_template.jinja"
    source = apart.read_text("utf-8") if apart.is_file() else _select_default_template(described)
    if not source:
        raise ValueError("holds no chat template: neither a chat_template.jinja nor one in "
                         "tokenizer_config.json")  # fmt: skip
    tokens = {
        name: _get_token_text(value) for name, value in described.items() if name.endswith("_token")
    }
    return source, {name: text for name, text in tokens.items() if text is not None}


def _read_json_object(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_CONFIG_SIZE:
        raise ValueError(f"holds a {path.name} that is too large")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"holds a {path.name} that can't be read: {e}") from None


def _select_default_template(described: Mapping[str, Any]) -> str:
    match described.get("chat_template"):
        case str() as source:
            return source
        case list() as several:
            named = {one["name"]: one["template"] for one in several if isinstance(one, dict)}
            return str(named.get("default", ""))
        case _:
            return ""


def _get_token_text(value: Any) -> str | None:
    """A special token, which may be written as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


# --- what a template sees -------------------------------------------------------------------------


def _decode_arguments(arguments: Mapping[str, Raw]) -> dict[str, Any]:
    return {name: msgspec.json.decode(raw) for name, raw in arguments.items()}


def _convert_message(message: Message) -> dict[str, Any]:
    seen: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        seen["name"] = message.name
    if message.tool_calls:
        seen["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _parse_call_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        seen["tool_call_id"] = message.tool_call_id
    return seen


def _parse_call_arguments(text: str) -> Any:
    """As an object, which templates write out themselves; as it is where it is no JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _convert_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
    if tool.parameters is not None:
        function["parameters"] = msgspec.json.decode(tool.parameters)
    return {"type": "function", "function": function}


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=indent or 0) if indent else encoded).decode()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)

"""What a request for text asks: the parts of ``spec.Generate``.

``None`` means: the model's own default.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct


class WatermarkSettings(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a text is marked; a detector must be told the same. See ``watermark``."""

    key: int = 15485863
    ratio: float = 0.25
    """The share of the vocabulary that is green."""
    bias: float = 2.0
    """What is added to the logits of green tokens."""
    scheme: Literal["lefthash", "selfhash"] = "lefthash"
    width: int = 1
    """So many tokens seed the next one's green list; lefthash waits for so many, and uses one."""


class EngineSamplingParams(Struct, frozen=True, omit_defaults=True):
    """How a token is picked."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    watermark: WatermarkSettings | None = None


class BeamSearchParams(Struct, frozen=True, omit_defaults=True):
    """Search for the likeliest texts, ``width`` at a time, instead of drawing some.

    ``groups`` search each for themselves with an equal share of the width; ``diversity_penalty`` is
    taken from the log probability of a token for each earlier group that has just taken it. A text
    is as good as its log probability over its length to the power of ``length_penalty``.
    """

    width: int
    groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0


class StopParams(Struct, frozen=True, omit_defaults=True):
    """When a choice ends."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class OutputFormat(Struct, frozen=True, omit_defaults=True):
    """What a text has to be.

    ``text`` is a JSON Schema, a regular expression, a JSON array of the texts to choose from, or a
    grammar in the notation of Lark or GBNF. ``param`` is the client's name for it.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    lenient: bool = False
    """Of a schema, the keys that can't be held to are left aside."""
    param: str = "response_format"


class FunctionDefinition(Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. ``parameters`` is a JSON Schema."""

    name: str
    description: str | None = None
    parameters: bytes = b'{"type":"object","properties":{},"additionalProperties":false}'
    strict: bool = False
    """Its schema must be held to in everything."""


class FunctionChoice(Struct, frozen=True, omit_defaults=True):
    """Which functions may be called (``names``), whether one must be, and whether several may."""

    names: tuple[str, ...]
    required: bool = False
    parallel: bool = True


class FunctionCall(Struct, frozen=True, omit_defaults=True):
    """A call that an assistant made; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


class ChatTurn(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation. ``call_id`` names the call whose result it is."""

    role: str
    content: str
    name: str | None = None
    calls: tuple[FunctionCall, ...] = ()
    call_id: str | None = None


class PromptInput(Struct, frozen=True, omit_defaults=True):
    """A conversation (``turns``), or prompts of text or token ids.

    ``wrap`` gives each prompt to the chat template as a user's only message. ``keep`` is how many
    of the last prompt tokens stay (-1: as many as fit); without it a prompt that is too long fails.
    """

    turns: tuple[ChatTurn, ...] = ()
    functions: tuple[FunctionDefinition, ...] = ()
    """Told to the model."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    as_user_message: bool = False
    template: str | None = None
    template_arguments: bytes = b"{}"
    """The template's further variables: a JSON object."""
    continue_final: bool = False
    generation_prompt: bool = True
    special_tokens: bool | None = None
    """Those of the tokenizer around a text; None: around prompts, not around conversations."""
    truncate_to: int | None = None

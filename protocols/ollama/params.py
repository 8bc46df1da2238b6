"""Options and the other scalar parameters.

Source: ollama 0.9, api/types.go (Options, DefaultOptions, FromMap).
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Raw

from protocols import params
from protocols.chat.params import NULL, as_object, null_to_none
from protocols.core.errors import InvalidParameter
from protocols.core.stateful import StatefulField
from protocols.json_body import decode_value
from protocols.params import Param, ParamTable, ParsedParams

OPTION_PARAMS: Final = ParamTable(
    Param("temperature", "sampling.temperature", "float"),
    Param("top_p", "sampling.top_p", "float"),
    Param("top_k", "sampling.top_k", "int"),
    Param("min_p", "sampling.min_p", "float"),
    Param("typical_p", "sampling.typical_p", "float"),
    Param("num_predict", "stopping.max_tokens", "int"),
    Param("stop", "stopping.stop", "strings"),
    Param("seed", "sampling.seed", "int"),
    Param("repeat_penalty", "sampling.repetition_penalty", "float"),
    Param("presence_penalty", "sampling.presence_penalty", "float"),
    Param("frequency_penalty", "sampling.frequency_penalty", "float"),
)
"""The options that have a field in the internal request.

The server checks no range. Its defaults (temperature 0.8, top_p 0.9, top_k 40, …) are those of its
models and are not set here: the target's hold.
"""

REQUEST_PARAMS: Final = ParamTable(
    Param("stream", "stream", "bool", default=True),
    Param("raw", "request.raw", "bool", default=False),
    Param("logprobs", "request.logprobs", "bool", default=False),
    Param("top_logprobs", "request.top_logprobs", "int", 0, 20),
    Param("truncate", "stopping.overflow", "bool", default=True),
)
CHAT_PARAMS: Final = ParamTable(*[row for row in REQUEST_PARAMS if row.wire != "raw"])
EMBEDDING_PARAMS: Final = ParamTable(
    Param("truncate", "overflow", "bool", default=True),
    Param("dimensions", "request.dimensions", "int"),
)

_OPTION_TYPE_NAMES: Final[Mapping[str, str]] = {
    "float": "float32",
    "int": "integer",
    "strings": "array",
}
_POSITIVE_OPTIONS: Final = ("num_predict", "top_k")
"""Other values of them mean no limit."""
_SEED_LIMIT: Final = 1 << 64


def read_options(
    fields: Mapping[str, Raw],
    values: ParsedParams,
    extra: dict[str, Raw],
    table: ParamTable = OPTION_PARAMS,
) -> None:
    """Decode ``options`` into ``values``; ``extra`` gets those that are not in ``table``.

    Raises InvalidParameter.
    """
    raw = null_to_none(fields.get("options"))
    if raw is None:
        return
    options = as_object(raw, "options")
    for name, item in options.items():
        if item != NULL and name not in table.by_wire:
            extra[f"options.{name}"] = item
    for row in params.select_by_wire(table, options):
        value = _read_option(row, decode_value(options[row.wire]))
        if value is not None:
            values[row.field] = value


def _read_option(row: Param, value: Any) -> Any:
    """The value of an option; None for one that is off."""
    if value is None:
        return None
    if row.type == "int" and type(value) is float:
        value = int(value)  # as the server does
    try:
        value = params.check_param(row, value, at="options.")
    except InvalidParameter as error:
        expected = _OPTION_TYPE_NAMES[row.type]
        error.message = f'option "{row.wire}" must be of type {expected}'
        raise
    if row.wire in _POSITIVE_OPTIONS and value <= 0:
        return None
    if row.wire == "seed":
        return value if 0 <= value < _SEED_LIMIT else None
    return tuple(filter(None, value)) if row.wire == "stop" else value


STATEFUL_FIELDS: Final = (
    StatefulField(
        "context",
        "forwarded",
        "the tokens of the conversation before, as another server made them",
        "The tokens of an earlier answer mean nothing to this model: use /api/chat.",
    ),
    StatefulField(
        "keep_alive",
        "reported",
        "how long a model stays loaded: honoured by a local model that is loaded on demand",
    ),
)
"""The fields that refer to what a server keeps."""

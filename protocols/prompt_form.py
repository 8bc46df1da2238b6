"""How a form sends a prompt to an operation.

An adapter adds a form to an operation of its OpenAPI description, as ``x-prompt-form``; the
playground of the web UI reads it, and knows no protocol by name::

    build_operation("Answer a conversation.", …) | FORM.describe()
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocols.params import Param

EXTENSION: Final = "x-prompt-form"
_PARAMETERS: Final[Mapping[str, str]] = {
    "max_tokens": "stopping.max_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "seed": "sampling.seed",
}
"""The parameters of a form, and their fields of the internal request."""


def find_parameters(table: Iterable[Param], parent: str = "") -> dict[str, str]:
    """Where the parameters of a form stand in a body: those of them that the table has.

    ``parent``: the path of the object that has them, with a dot at its end.
    """
    wires: dict[str, list[str]] = {}
    for row in table:
        wires.setdefault(row.field, []).append(row.wire)
    offered = {name: wires[field] for name, field in _PARAMETERS.items() if field in wires}
    return {name: parent + (name if name in rows else rows[0]) for name, rows in offered.items()}


class SdkExample(Struct, frozen=True, kw_only=True):
    """A Python program that calls an operation with the protocol's client library.

    In ``client`` and ``keyless_client``, ``{url}`` stands for the base URL, which is that of the
    operation without ``path``, and ``{key}`` for the API key. ``streamed`` and ``whole`` print the
    text of ``response``.
    """

    imports: str
    client: str
    keyless_client: str
    method: str
    path: str
    streamed: Sequence[str]
    whole: Sequence[str]


class PromptForm(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a request, and what the form may add.

    In ``body`` these stand for what was entered: ``$model``, ``$prompt``, ``$system``,
    ``$messages`` (the conversation; the system prompt is its first message) and ``$turns`` (the
    conversation without the system prompt). A member whose value was not entered is left out. A
    body without ``$model`` is for paths that name the model.

    ``parameters`` and ``stream_flag`` are paths of members, with dots. Where streams have a path
    of their own, it ends with ``stream_suffix``.
    """

    label: str
    body: Mapping[str, Any]
    parameters: Mapping[str, str]
    stream_flag: str = ""
    stream_suffix: str = ""
    sdk: SdkExample | None = None

    def describe(self) -> dict[str, Any]:
        """The member to add to an operation object."""
        return {EXTENSION: msgspec.to_builtins(self)}

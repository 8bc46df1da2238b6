"""What each pair of a client protocol and a worker keeps, maps, reports, emulates and refuses.

Nothing is listed by hand: the fields are those of the client's tables, each is put into a request,
and the worker's adapter says what it loses and how it writes the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from docs.generate.markdown import code, table
from docs.generate.protocols import (
    EMULATED,
    REFUSED,
    FieldSample,
    LossReporter,
    ProtocolProfiles,
    find_support,
    generate_samples,
    list_client_names,
)
from protocols.core.errors import GatewayError
from protocols.core.interfaces import UpstreamAdapter

_INTRO: Final = """## Pairs of protocols

What becomes of the fields of a client's request for the workers of each protocol, in their default
profile; *(chat)* and *(prompts)* stand where conversations and prompts differ. *kept*: sent under
the same name. *mapped*: sent under the worker's own name. *reported*: listed in
`x-interlingua-loss`, or the request is refused with `on_loss: reject`. *by the gateway*: emulated.
*refused*: always. Keys that the gateway does not know are kept if client and worker speak the same
protocol, and reported for every other worker; so are unknown words of enumerations, unless they are
refused. Unknown parameters of a query are reported as `query.NAME`, and
[headers](#headers-of-requests) as `header.NAME`. A worker without custom tools gets a function with
one text for each, and its calls come back as those of the custom tool; a grammar becomes part of
the description, which is reported. A request that needs no change is passed through between equal
protocols, with all that it holds. The other profiles are in the
[last section](#parameters-supported-by-workers).

Of an answer, a client gets reasoning, refusals and tool calls as what they are, or they are
reported by their place (`response.choices[0].message.reasoning_content`, `.refusal`,
`.tool_calls[1]`): *approximated* if they are text like any other (refusals for clients of Ollama,
Cohere, OVMS and MindIE; reasoning as well for those of TGI's and MindIE's prompts), *dropped* if
the client gets nothing of them (reasoning for clients of Triton, OVMS's and OpenAI's completions;
tool calls for all clients of prompts but Ollama's; a call that the token limit has cut, where
arguments are an object; further calls for a client that takes one). Signatures of reasoning go to
Anthropic clients and into the items and the store of the Responses API. Reasoning is no loss for an
Anthropic client that did not ask for it, and none for any client that hid it.

Comments, ids (`id:`), the time to reconnect (`retry:`) and names of events (`event:`) that a
worker's protocol does not use are framing of one connection, not content: no client gets them, and
they are not reported. An event of an unknown type is content: it is kept or reported as
`response.events.TYPE`.
"""
_HEAD: Final = ("client", "worker", "kept", "mapped", "reported", "by the gateway", "refused")
_KINDS: Final = {"chat": "chat", "completion": "prompts"}


def pair_table(protocols: Sequence[ProtocolProfiles], reporters: Mapping[str, LossReporter]) -> str:
    """The table of all pairs."""
    samples = [*generate_samples("chat"), *generate_samples("completion")]
    rows = (
        (client.name, worker, *_list_outcomes(names, samples, reporter))
        for client in protocols
        for names in (list_client_names(client),)
        for worker, reporter in reporters.items()
    )
    return _INTRO + "\n" + table(_HEAD, rows)


def _list_outcomes(
    names: Mapping[str, str], samples: Sequence[FieldSample], reporter: LossReporter
) -> Iterator[str]:
    """The cells of kept, mapped, reported, emulated and refused fields."""
    outcomes: dict[str, dict[str, tuple[str, str]]] = {}
    for sample in samples:
        if name := names.get(sample.path):
            shown = name + (f" ({sample.shape})" if sample.shape else "")
            kind = getattr(sample.request, "kind", "")
            outcomes.setdefault(shown, {})[kind] = _find_outcome(name, sample, reporter)
    cells: dict[str, list[str]] = {name: [] for name in _HEAD[2:]}
    for shown, by_kind in outcomes.items():
        differs = len(set(by_kind.values())) > 1
        for kind, (outcome, detail) in by_kind.items():
            entry = shown + detail + (f" ({_KINDS[kind]})" if differs else "")
            if entry not in cells[outcome]:
                cells[outcome].append(entry)
    return (", ".join(entries) for entries in cells.values())


def _find_outcome(name: str, sample: FieldSample, reporter: LossReporter) -> tuple[str, str]:
    """The column, and what follows the field's name in it."""
    support = find_support(sample, reporter)
    if support == EMULATED:
        return "by the gateway", ""
    if support == REFUSED:
        return "refused", ""
    if not support.startswith(("carried", "clamped from", "clamped to")):
        return "reported", f" {support}"
    wire = _find_wire_path(name, sample, reporter)
    limits = support.removeprefix("carried")
    detail = f" ({limits})" if limits else ""
    if not wire or code(wire[0]) in name.split(", "):
        return "kept", detail
    return "mapped", f" → {code('.'.join(wire))}{detail}"


def _find_wire_path(name: str, sample: FieldSample, reporter: LossReporter) -> tuple[str, ...]:
    """The path of what the field adds to the worker's body; () if it adds nothing or is local."""
    if not isinstance(reporter, UpstreamAdapter):
        return ()
    try:
        body = reporter.encode_request(sample.request).body
        base = reporter.encode_request(sample.base).body
    except GatewayError:
        return ()
    before = dict(_iterate_leaves(msgspec.json.decode(base), ()))
    added = [
        path
        for path, value in _iterate_leaves(msgspec.json.decode(body), ())
        if before.get(path) != value
    ]
    return min(added, key=lambda path: (path[-1] not in name, len(path)), default=())


def _iterate_leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values that are no objects, with their paths."""
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from _iterate_leaves(one, (*path, name))
    else:
        yield path, value

"""The results of probing a worker: a table, JSON, and the setting of a pool."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from gateway.tools.probe.runner import ProbeResult
from protocols.core.restricted import PARAMETERS

_BASIS: Final = "whole"
"""If this probe fails, the others may fail for the same reason, and prove nothing about a field."""
_HEAD: Final = """\
# What a worker does not support, found by interlingua probe.
# For a pool of such workers in the gateway's configuration.
"""


class ProbedWorker(Struct, frozen=True):
    """The worker that was probed."""

    url: str
    protocol: str
    profile: str
    model: str | None


def unsupported_fields(results: Sequence[ProbeResult]) -> list[str]:
    """The fields of the internal request that the worker rejects or ignores."""
    basis = [result for result in results if result.name == _BASIS] or results
    if not any(result.outcome == "passed" for result in basis):
        return []
    return sorted({path for result in results for path in result.fields} & PARAMETERS)


def collect_quirks(results: Sequence[ProbeResult]) -> dict[str, str]:
    """Failures and other observations, by the probe's name."""
    quirks = {}
    for result in results:
        notes = ([result.detail] if result.outcome == "failed" else []) + list(result.quirks)
        if notes:
            quirks[result.name] = "; ".join(notes)
    return quirks


def count_outcomes(results: Sequence[ProbeResult]) -> Mapping[str, int]:
    """How many probes had which outcome."""
    count = Counter(result.outcome for result in results)
    return {
        "passed": count["passed"],
        "failed": count["failed"],
        "not_offered": count["not offered"],
    }


def exit_code(results: Sequence[ProbeResult]) -> int:
    """0 if none failed, 1 if some did, 2 if none could be tried."""
    count = count_outcomes(results)
    return 1 if count["failed"] else 0 if count["passed"] else 2


# --- for people and programs ----------------------------------------------------------------------


def format_row(result: ProbeResult, width: int) -> str:
    """A row of the table."""
    promise = f"{result.what} " if result.outcome == "failed" else ""
    detail = promise + "; ".join(filter(None, (result.detail, *result.quirks)))
    return f"{result.name.ljust(width)}  {result.outcome:11}  {detail}".rstrip()


def format_summary(results: Sequence[ProbeResult]) -> str:
    """The lines below the table."""
    lines = []
    if unsupported := unsupported_fields(results):
        lines.append(f"not supported: {', '.join(unsupported)}")
    counts = count_outcomes(results).items()
    lines.append(", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts))
    return "\n".join(lines)


def encode_json(worker: ProbedWorker, results: Sequence[ProbeResult]) -> str:
    """Everything, as JSON."""
    document = msgspec.structs.asdict(worker) | {"probes": results} | dict(count_outcomes(results))
    document |= {"fields": unsupported_fields(results), "quirks": collect_quirks(results)}
    return msgspec.json.encode(document).decode()


# --- for a pool -----------------------------------------------------------------------------------


def encode_unsupported_parameters(worker: ProbedWorker, results: Sequence[ProbeResult]) -> str:
    """The setting of a pool of such workers, as YAML, with the quirks in comments."""
    notes = {"protocol": worker.protocol, "profile": worker.profile, "model": worker.model}
    notes |= {f"quirk of {name}": text for name, text in collect_quirks(results).items()}
    comments = [
        f"# {name}: {_on_one_line(text)}" for name, text in notes.items() if text is not None
    ]
    setting = f"unsupported_parameters: [{', '.join(unsupported_fields(results))}]"
    return _HEAD + "\n".join([*comments, setting]) + "\n"


def _on_one_line(text: str) -> str:
    """A worker's text without the characters that would end a comment in YAML."""
    return "".join(char if char.isprintable() else " " for char in text)

"""What an answer tells besides its text, for each choice."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.events import FinishReason, TokenLogprob

_FINISH_REASONS: Final[Mapping[FinishReason | None, str]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "tool_calls": "stop",
    "content_filter": "stop",
    "unknown": "None",
    None: "None",
}
"""The original prints Python's None while a choice goes on."""


class ChoiceOutput(Struct):
    """What an event, or a whole answer, adds to one choice.

    ``total`` is the log probability of the choice so far, where the worker tells any.
    """

    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    logprobs: Sequence[TokenLogprob] = ()
    cumulative_logprob: float | None = None


def list_choice_outputs(answer: UnaryResponse) -> list[ChoiceOutput]:
    """The choices of a whole answer."""
    return [_build_choice_output(choice, answer) for choice in answer.choices]


def _build_choice_output(choice: UnaryChoice, answer: UnaryResponse) -> ChoiceOutput:
    tokens = choice.tokens
    if answer.usage is not None and len(answer.choices) == 1:
        tokens = answer.usage.completion_tokens
    own = choice.logprobs[max(len(choice.logprobs) - choice.tokens, 0) :]
    return ChoiceOutput(
        text=choice.text + choice.refusal,
        tokens=tokens,
        finish_reason=choice.finish_reason,
        matched_stop=choice.matched_stop,
        logprobs=own,
        cumulative_logprob=sum_logprobs(own) if own else None,
    )


def sum_logprobs(logprobs: Sequence[TokenLogprob]) -> float:
    """The log probability of these tokens together."""
    return sum(one.logprob for one in logprobs if one.logprob is not None)


def get_output_values(
    name: str, row: Sequence[ChoiceOutput], prompt_tokens: int | None
) -> list[Any] | None:
    """An output's values, one for each choice; None where nobody knows them."""
    if name == "num_input_tokens":
        return None if prompt_tokens is None else [prompt_tokens]
    if name in _LOGPROB_OUTPUTS and all(piece.cumulative_logprob is None for piece in row):
        return None
    return [_OUTPUT_READERS[name](piece) for piece in row]


def _list_logprobs(piece: ChoiceOutput) -> list[float]:
    return [one.logprob or 0.0 for one in piece.logprobs]


def _encode_candidates(piece: ChoiceOutput) -> str:
    """A JSON text: for each token, the candidates by their id."""
    return msgspec.json.encode([_build_candidates(one) for one in piece.logprobs]).decode()


def _build_candidates(token: TokenLogprob) -> dict[str, dict[str, Any]]:
    """The token that was taken stands first, as readers need it to."""
    ranked = sorted(token.top, key=lambda one: -one.logprob)
    taken = _get_candidate_key(token.id, token.token)
    found = {taken: _build_candidate(token.logprob, None, token.token)}
    for rank, one in enumerate(ranked, 1):
        found[_get_candidate_key(one.id, one.token)] = _build_candidate(
            one.logprob, rank, one.token
        )
    return found


def _build_candidate(logprob: float | None, rank: int | None, token: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token}


def _get_candidate_key(number: int | None, token: str) -> str:
    return token if number is None else str(number)


_LOGPROB_OUTPUTS: Final = frozenset(
    {"cumulative_logprob", "cum_log_probs", "output_log_probs", "logprobs"}
)
_OUTPUT_READERS: Final[Mapping[str, Callable[[ChoiceOutput], Any]]] = {
    "text_output": lambda piece: piece.text,
    "finish_reason": lambda piece: _FINISH_REASONS[piece.finish_reason],
    "stop_reason": lambda piece: str(piece.matched_stop),
    "num_output_tokens": lambda piece: piece.tokens,
    "cumulative_logprob": lambda piece: piece.cumulative_logprob,
    "cum_log_probs": lambda piece: piece.cumulative_logprob,
    "output_log_probs": _list_logprobs,
    "logprobs": _encode_candidates,
}

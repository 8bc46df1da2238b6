"""Prompt-lookup decoding: likely next tokens of a sequence, from its own earlier tokens.

A model often repeats what stands in its prompt or output: names, code, quotations, JSON keys. If
the last tokens of a sequence have occurred before, the tokens that followed them are a draft. One
forward pass computes the logits after each token of the draft, and takes little longer than one for
a single token, since most of its time is spent on reading the weights. The draft is accepted as far
as its tokens are those that the sequence selects from these logits, one after another. So the
output is the same as without drafts, with every sampling parameter.

Drafts are short, and a sequence whose drafts are wrong makes fewer of them.
"""

from collections.abc import Sequence
from typing import Final, Literal

MAX_PASS_TOKENS: Final = 16
"""The tokens of a forward pass with drafts; a token more than these costs more time."""
_MATCHED_TOKENS: Final = 3
"""How many of the last tokens must have occurred before."""
_SHORT_DRAFT: Final = 3
_LONG_DRAFT: Final = 7
"""Tokens of a draft, and of one after a draft that was right, unless the configuration has fewer
or more."""
_MAX_PAUSE: Final = 32
"""The most tokens without a draft after one that was wrong."""


DraftSetting = Literal["auto", "off"] | int
"""The setting ``prompt_lookup``: the number is the most tokens of a draft."""


def choose_longest_draft(setting: DraftSetting, *, is_exact: bool) -> int:
    """The most tokens of a draft; 0: there are none.

    ``is_exact``: a token has the same logits in a pass of its own and in one with a draft.
    """
    if isinstance(setting, int):
        return setting
    return _LONG_DRAFT if setting == "auto" and is_exact else 0


def describe_drafts(setting: DraftSetting, *, is_exact: bool | None) -> str:
    """Whether there are drafts, and why not, for a person. None: the model is not loaded."""
    if setting == "off":
        return "off by configuration"
    if is_exact is None and setting == "auto":
        return "on, if the logits do not depend on the size of a step (checked at load)"
    longest = choose_longest_draft(setting, is_exact=bool(is_exact))
    if not longest:
        return "off: the logits of a token depend on the size of the step"
    rounding = (
        "" if is_exact is not False else "; outputs may differ from those without by rounding"
    )
    return f"drafts of at most {longest} tokens{rounding}"


class PromptLookup:
    """The drafts of one sequence."""

    def __init__(self, prompt: Sequence[int], longest: int = _LONG_DRAFT) -> None:
        self._tokens = list(prompt)
        self._indexed = _MATCHED_TOKENS
        self._next_position: dict[tuple[int, ...], int] = {}
        """By some consecutive tokens, the position after their last occurrence."""
        self._prompt_length = len(prompt)
        self._longest = longest
        self._draft_length = min(_SHORT_DRAFT, longest)
        self._pause = 1
        self._resumes_at = 0

    def draft(self, output: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` tokens that are likely to follow the prompt and ``output``."""
        tokens = self._tokens
        tokens += output[len(tokens) - self._prompt_length :]
        if limit <= 0 or len(tokens) < self._resumes_at:
            return []
        # The last tokens are not in the index before the token after them is known.
        for position in range(self._indexed, len(tokens)):
            self._next_position[tuple(tokens[position - _MATCHED_TOKENS : position])] = position
        self._indexed = max(self._indexed, len(tokens))
        start = self._next_position.get(tuple(tokens[-_MATCHED_TOKENS:]))
        if start is None:
            return []
        period = len(tokens) - start  # what has just been repeated may be repeated again
        return [tokens[start + i % period] for i in range(min(limit, self._draft_length))]

    def record_result(self, drafted: int, accepted: int) -> None:
        """Adapt the next drafts to how many tokens of the last one were accepted."""
        length = self._longest if accepted == drafted else _SHORT_DRAFT
        self._draft_length = min(length, self._longest)
        self._pause = 1 if accepted else min(2 * self._pause, _MAX_PAUSE)
        if not accepted:
            self._resumes_at = len(self._tokens) + self._pause

"""Grammars are compiled in the background, cached, and time out."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from backends.torch import token_selection
from backends.torch.ipc import (
    EngineSamplingParams,
    GenerateCommand,
    OutputFormat,
    PromptInput,
    TextEvent,
)
from backends.torch.structured_output import MAX_CACHED_GRAMMARS, GrammarCompiler, GrammarPart
from backends.torch.tokenization import RequestRejectedError

Drive = Callable[..., Any]


def asked(form: OutputFormat | None, *, job: int = 1) -> GenerateCommand:
    return GenerateCommand(
        job,
        PromptInput(prompts=("x",)),
        EngineSamplingParams(temperature=1, seed=1),
        output_format=form,
    )


class Slow:
    """Stands for Grammars: everything waits for ``go``."""

    def __init__(self, tokenizer: Any) -> None:
        self.go = threading.Event()
        self._inner = GrammarCompiler(tokenizer, 259, frozenset({257}), lambda: None)

    def compile_grammar(self, source: Any) -> Any:
        return self._inner._threads.submit(self._compile, source)

    def _compile(self, source: Any) -> Any:
        assert self.go.wait(30)
        return self._inner._compile_grammar(source)


def slow(got: Any, tokenizer: Any) -> Slow:
    got.engine._grammar_manager._compiler = found = Slow(tokenizer)
    return found


def test_others_do_not_wait_for_a_grammar(noisy: Drive, tokenizer: Any) -> None:
    got = noisy()
    grammars = slow(got, tokenizer)
    got.engine.submit(asked(OutputFormat("regex", "abc")))
    got.engine.submit(asked(None, job=2))
    assert got.engine.waiting_count == 2
    while got.engine.step():
        pass
    assert got.finished(2)
    assert got.select(TextEvent) == []
    grammars.go.set()
    (future,) = got.engine._grammar_manager._waiting.values()
    future.result(30)
    assert got.run().text() == "abc"


def test_a_grammar_that_takes_too_long_is_refused(noisy: Drive, tokenizer: Any) -> None:
    got = noisy()
    grammars = slow(got, tokenizer)
    got.engine.submit(asked(OutputFormat("regex", "abc")))
    got.now = token_selection.COMPILE_TIMEOUT - 1
    assert not got.engine.step()
    got.now = token_selection.COMPILE_TIMEOUT
    got.engine.step()
    assert (got.failed().kind, got.failed().param) == ("unsupported", "response_format")
    assert "within 10 s" in got.failed().message
    assert got.engine.waiting_count == 0
    grammars.go.set()


def test_who_leaves_while_it_is_prepared(noisy: Drive, tokenizer: Any) -> None:
    got = noisy()
    grammars = slow(got, tokenizer)
    got.engine.submit(asked(OutputFormat("regex", "abc")))
    got.engine.cancel(1)
    grammars.go.set()
    assert got.run().events == []
    assert got.engine.waiting_count == 0


def test_too_many_at_once_are_overload(
    noisy: Drive, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_selection, "MAX_PENDING_REQUESTS", 2)
    got = noisy()
    grammars = slow(got, tokenizer)
    for job in (1, 2, 3):
        got.engine.submit(asked(OutputFormat("regex", "abc"), job=job))
    assert got.failed(3).kind == "overloaded"
    grammars.go.set()


def grammars(tokenizer: Any, woken: threading.Event | None = None) -> GrammarCompiler:
    wake = (woken or threading.Event()).set
    return GrammarCompiler(tokenizer, 259, frozenset({257}), wake)


def test_a_grammar_is_compiled_once_and_kept_for_a_while(tokenizer: Any) -> None:
    woken = threading.Event()
    cache = grammars(tokenizer, woken)
    first = cache.compile_grammar((GrammarPart("form", "regex", "a"),))
    assert not first.result(30).is_finished
    assert woken.wait(30)
    assert cache.compile_grammar((GrammarPart("form", "regex", "a"),)) is first
    assert cache.compile_grammar((GrammarPart("form", "json", "a"),)) is not first
    for number in range(MAX_CACHED_GRAMMARS - 1):
        cache.compile_grammar((GrammarPart("form", "regex", f"a{number}"),))
    assert len(cache._cache) == MAX_CACHED_GRAMMARS
    assert cache.compile_grammar((GrammarPart("form", "regex", "a"),)) is not first


def test_a_tokenizer_that_can_not_be_read(tokenizer: Any) -> None:
    class Other:
        """No fast tokenizer."""

    found = grammars(Other())
    found.load_vocabulary()
    with pytest.raises(RequestRejectedError, match="tokenizer does not support"):
        found.compile_grammar((GrammarPart("form", "regex", "a"),)).result(30)


def test_without_the_library_that_holds(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(RequestRejectedError, match="needs llguidance"):
        grammars(tokenizer).compile_grammar((GrammarPart("form", "regex", "a"),)).result(30)


def test_the_vocabulary_is_read_before_the_first_request(noisy: Drive) -> None:
    got = noisy()
    got.engine.warm_up()
    words = got.engine._grammar_compiler._token_table
    assert words.vocab_size == 259
    got.run(asked(OutputFormat("regex", "a")))
    assert got.engine._grammar_compiler._token_table is words


def test_a_text_that_is_too_complex_to_follow(noisy: Drive) -> None:
    class Broken:
        """A matcher that has given up."""

        def compute_bitmask(self) -> bytes:
            return bytes(36)

        def is_error(self) -> bool:
            return True

        def deep_copy(self) -> "Broken":
            return self

        def is_stopped(self) -> bool:
            return False

    got = noisy()
    got.engine.submit(asked(OutputFormat("regex", "abc")))
    (future,) = got.engine._grammar_manager._waiting.values()
    future.result(30)._matcher = Broken()
    failed = got.run().failed()
    assert (failed.kind, failed.param) == ("unsupported", "response_format")
    assert "too complex" in failed.message


def test_what_goes_wrong_otherwise_is_told_without_its_words(
    noisy: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: GrammarCompiler, source: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(GrammarCompiler, "_compile_grammar", broken)
    failed = noisy().run(asked(OutputFormat("regex", "a"))).failed()
    assert (failed.kind, failed.message) == ("failed", "the local model failed: RuntimeError")

"""Grammars are compiled in the background, cached, and limited in time."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from backends.torch import grammar_manager
from backends.torch.grammar_compiler import MAX_CACHED_GRAMMARS, GrammarCompiler
from backends.torch.grammar_source import GrammarPart
from backends.torch.ipc import (
    EngineSamplingParams,
    GenerateCommand,
    OutputRule,
    PromptInput,
    TextEvent,
)
from backends.torch.rejection import RequestRejectedError

Drive = Callable[..., Any]


def make_command(form: OutputRule | None, *, job: int = 1) -> GenerateCommand:
    return GenerateCommand(
        job,
        PromptInput(prompts=("x",)),
        EngineSamplingParams(temperature=1, seed=1),
        output_format=form,
    )


class BlockingCompiler:
    """A compiler that waits for ``go``."""

    def __init__(self, tokenizer: Any) -> None:
        self.go = threading.Event()
        self._inner = GrammarCompiler(tokenizer, 259, frozenset({257}), lambda: None)

    def compile_grammar(self, source: Any) -> Any:
        return self._inner._threads.submit(self._compile, source)

    def _compile(self, source: Any) -> Any:
        assert self.go.wait(30)
        return self._inner._compile_grammar(source)


def install_blocking_compiler(driver: Any, tokenizer: Any) -> BlockingCompiler:
    driver.engine._grammar_manager._compiler = compiler = BlockingCompiler(tokenizer)
    return compiler


def test_grammar_compilation_does_not_block_other_requests(noisy: Drive, tokenizer: Any) -> None:
    driver = noisy()
    grammars = install_blocking_compiler(driver, tokenizer)
    driver.engine.submit(make_command(OutputRule("regex", "abc")))
    driver.engine.submit(make_command(None, job=2))

    assert driver.engine.waiting_count == 2

    while driver.engine.step():
        pass
    assert driver.finished(2)
    assert driver.select(TextEvent) == []

    grammars.go.set()
    (future,) = driver.engine._grammar_manager._waiting.values()
    future.result(30)

    assert driver.run().text() == "abc"


def test_grammar_compile_timeout_rejects_the_request(noisy: Drive, tokenizer: Any) -> None:
    driver = noisy()
    grammars = install_blocking_compiler(driver, tokenizer)
    driver.engine.submit(make_command(OutputRule("regex", "abc")))
    driver.now = grammar_manager.COMPILE_TIMEOUT - 1

    assert not driver.engine.step()
    assert repr(driver.engine._grammar_manager) == "<GrammarManager 1 requests waiting>"

    driver.now = grammar_manager.COMPILE_TIMEOUT
    driver.engine.step()
    assert (driver.failed().kind, driver.failed().param) == ("unsupported", "response_format")
    assert "within 10 s" in driver.failed().message
    assert driver.engine.waiting_count == 0

    grammars.go.set()


def test_request_can_be_cancelled_during_grammar_compilation(noisy: Drive, tokenizer: Any) -> None:
    driver = noisy()
    grammars = install_blocking_compiler(driver, tokenizer)
    driver.engine.submit(make_command(OutputRule("regex", "abc")))
    driver.engine.cancel(1)
    grammars.go.set()

    assert driver.run().events == []
    assert driver.engine.waiting_count == 0


def test_too_many_pending_grammars_are_overloaded(
    noisy: Drive, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_manager, "MAX_PENDING_REQUESTS", 2)
    driver = noisy()
    grammars = install_blocking_compiler(driver, tokenizer)

    for job in (1, 2, 3):
        driver.engine.submit(make_command(OutputRule("regex", "abc"), job=job))

    assert driver.failed(3).kind == "overloaded"

    grammars.go.set()


def make_compiler(tokenizer: Any, woken: threading.Event | None = None) -> GrammarCompiler:
    wake = (woken or threading.Event()).set
    return GrammarCompiler(tokenizer, 259, frozenset({257}), wake)


def test_compiled_grammars_are_cached_with_a_limit(tokenizer: Any) -> None:
    woken = threading.Event()
    cache = make_compiler(tokenizer, woken)
    first = cache.compile_grammar((GrammarPart("form", "regex", "a"),))

    assert not first.result(30).is_finished
    assert woken.wait(30)
    assert cache.compile_grammar((GrammarPart("form", "regex", "a"),)) is first
    assert cache.compile_grammar((GrammarPart("form", "json", "a"),)) is not first

    for number in range(MAX_CACHED_GRAMMARS - 1):
        cache.compile_grammar((GrammarPart("form", "regex", f"a{number}"),))
    assert repr(cache) == f"<GrammarCompiler {MAX_CACHED_GRAMMARS} grammars cached>"
    assert cache.compile_grammar((GrammarPart("form", "regex", "a"),)) is not first


def test_unsupported_tokenizer_rejects_grammars(tokenizer: Any) -> None:
    class Other:
        """A tokenizer that is not a fast one."""

    compiler = make_compiler(Other())
    compiler.load_vocabulary()

    with pytest.raises(RequestRejectedError, match="tokenizer does not support"):
        compiler.compile_grammar((GrammarPart("form", "regex", "a"),)).result(30)


def test_missing_llguidance_rejects_grammars(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(RequestRejectedError, match="needs llguidance"):
        make_compiler(tokenizer).compile_grammar((GrammarPart("form", "regex", "a"),)).result(30)


def test_warm_up_loads_the_grammar_vocabulary(noisy: Drive) -> None:
    driver = noisy()
    driver.engine.warm_up()
    words = driver.engine._grammar_compiler._token_table

    assert words.vocab_size == 259

    driver.run(make_command(OutputRule("regex", "a")))
    assert driver.engine._grammar_compiler._token_table is words


def test_grammar_matcher_error_rejects_the_request(noisy: Drive) -> None:
    class Broken:
        """A matcher that has failed."""

        def compute_bitmask(self) -> bytes:
            return bytes(36)

        def is_error(self) -> bool:
            return True

        def deep_copy(self) -> "Broken":
            return self

        def is_stopped(self) -> bool:
            return False

    driver = noisy()
    driver.engine.submit(make_command(OutputRule("regex", "abc")))
    (future,) = driver.engine._grammar_manager._waiting.values()
    future.result(30)._matcher = Broken()

    failed = driver.run().failed()

    assert (failed.kind, failed.param) == ("unsupported", "response_format")
    assert "too complex" in failed.message


def test_unexpected_grammar_error_hides_its_message(
    noisy: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: GrammarCompiler, source: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(GrammarCompiler, "_compile_grammar", broken)
    failed = noisy().run(make_command(OutputRule("regex", "a"))).failed()

    assert (failed.kind, failed.message) == ("failed", "the local model failed: RuntimeError")

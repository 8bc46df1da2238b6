"""A tiny model with a byte tokenizer, runners with scripted output, and an engine driver."""

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from backends.torch.attention import BatchSegment
from backends.torch.detokenizer import _build_byte_letters
from backends.torch.engine import TorchEngine
from backends.torch.ipc import (
    ChoiceEndEvent,
    EngineEvent,
    GenerateCommand,
    PromptEchoEvent,
    RequestFailedEvent,
    RequestFinishedEvent,
    TextEvent,
)
from backends.torch.loaded_model import LoadedModel, assemble_model
from backends.torch.model import ATTENTION_NAME, ModelRunner
from backends.torch.scheduler import SchedulerConfig
from backends.torch.tokenization import InputProcessor

T = TypeVar("T")

torch.set_num_threads(1)

EOS = 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Any:
    """A tokenizer with a token for each byte, and special tokens."""
    vocabulary = {letter: byte for byte, letter in enumerate(_build_byte_letters())}
    bpe = Tokenizer(models.BPE(vocabulary, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer_class(
        tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_llama(**options: Any) -> Any:
    """A Llama model with two layers and fixed random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.3,
    )
    llama: Any = LlamaForCausalLM
    return llama._from_config(config, **options)


class ScriptedRunner:
    """A ModelRunner that generates a script after the prompt, independent of the sampled tokens."""

    context_length = 512
    vocabulary_size = 259
    cache_bytes_per_token = 0
    is_batch_invariant = True

    def __init__(self, script: Sequence[int], prompt: int, max_tokens: int = 1 << 30) -> None:
        self._script = script
        self._prompt = prompt
        self.max_tokens = max_tokens
        """A batch with more tokens fails with an out-of-memory error."""
        self.batch_sizes: list[int] = []
        """The number of segments in each forward pass."""

    def __call__(self, segments: Sequence[BatchSegment]) -> torch.Tensor:
        if sum(len(segment.tokens) for segment in segments) > self.max_tokens:
            raise RuntimeError("out of memory")
        self.batch_sizes.append(len(segments))
        rows = []
        for segment in segments:
            segment.cache.advance(len(segment.tokens))
            end = segment.cache.length - self._prompt
            for position in range(end - segment.logit_count + 1, end + 1):
                logits = torch.zeros(self.vocabulary_size)
                logits[self._script[position] if position < len(self._script) else EOS] = 30.0
                rows.append(logits)
        return torch.stack(rows) if rows else torch.zeros(0, self.vocabulary_size)


@functools.lru_cache(1024)
def _make_random_logits(seed: int, vocabulary: int) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))


class RandomRunner:
    """A ModelRunner that returns random logits, the same in every run."""

    context_length = 4096
    cache_bytes_per_token = 0
    is_batch_invariant = True

    def __init__(self, vocabulary: int = 259) -> None:
        self.vocabulary_size = vocabulary

    def __call__(self, segments: Sequence[BatchSegment]) -> torch.Tensor:
        rows = []
        for segment in segments:
            segment.cache.advance(len(segment.tokens))
            end = segment.cache.length
            for length in range(end - segment.logit_count + 1, end + 1):
                rows.append(_make_random_logits(length, self.vocabulary_size))
        return torch.stack(rows) if rows else torch.zeros(0, self.vocabulary_size)


def _get_request_id(event: Any) -> int:
    request_id: int = event.request_id
    return request_id


class EngineDriver:
    """Runs an engine step by step and records its events."""

    def __init__(self, model: LoadedModel, config: SchedulerConfig | None = None) -> None:
        self.now = 0.0
        self.events: list[EngineEvent] = []
        self.woken = threading.Event()
        """Set when the engine should step again."""
        self.engine = TorchEngine(
            model, config or SchedulerConfig(), self.events.append, lambda: self.now, self.woken.set
        )

    def run(self, *commands: GenerateCommand, steps: int = 1000) -> "EngineDriver":
        """Submit commands and step until no work is left."""
        for command in commands:
            self.engine.submit(command)
        for _ in range(steps):
            if not self.engine.step():
                if not (self.engine._grammar_manager or self.engine._background_tokenizer):
                    break
                assert self.woken.wait(30)
                self.woken.clear()
        return self

    def select(self, kind: type[T], request_id: int = 1) -> list[T]:
        """Return the events of a request that have this type."""
        return [
            one
            for one in self.events
            if isinstance(one, kind) and _get_request_id(one) == request_id
        ]

    def text(self, request_id: int = 1, choice: int = 0) -> str:
        """Return the text of a choice."""
        return "".join(
            event.text for event in self.select(TextEvent, request_id) if event.choice == choice
        )

    def ids(self, request_id: int = 1, choice: int = 0) -> list[int]:
        """Return the token ids of a choice."""
        return [
            i
            for event in self.select(TextEvent, request_id)
            if event.choice == choice
            for i in event.ids
        ]

    def ended(self, request_id: int = 1) -> dict[int, ChoiceEndEvent]:
        """Return the end event of each choice."""
        ends = self.select(ChoiceEndEvent, request_id)
        assert len({end.choice for end in ends}) == len(ends)
        return {end.choice: end for end in ends}

    def finished(self, request_id: int = 1) -> RequestFinishedEvent:
        """Return the only finish event of a request."""
        (event,) = self.select(RequestFinishedEvent, request_id)
        return event

    def failed(self, request_id: int = 1) -> RequestFailedEvent:
        """Return the only failure event of a request."""
        (event,) = self.select(RequestFailedEvent, request_id)
        return event

    def echo(self, request_id: int = 1) -> PromptEchoEvent:
        """Return the only prompt echo of a request."""
        (event,) = self.select(PromptEchoEvent, request_id)
        return event


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def tiny(tokenizer: Any) -> LoadedModel:
    return assemble_model(ModelRunner(tiny_llama(attn_implementation=ATTENTION_NAME)), tokenizer)


@pytest.fixture(scope="session")
def reference() -> Any:
    """The same model, run by transformers."""
    return tiny_llama().eval()


@pytest.fixture
def driven(tiny: LoadedModel) -> Callable[..., EngineDriver]:
    return lambda limits=None: EngineDriver(tiny, limits)


@pytest.fixture
def scripted(tokenizer: Any) -> Callable[..., tuple[EngineDriver, ScriptedRunner]]:
    """Make an engine whose model generates ``script`` after a prompt of one token."""

    def make(
        script: str | bytes | Sequence[int],
        config: SchedulerConfig | None = None,
        max_tokens: int = 1 << 30,
    ) -> tuple[EngineDriver, ScriptedRunner]:
        ids = list(script.encode() if isinstance(script, str) else script)
        runner = ScriptedRunner(ids, prompt=1, max_tokens=max_tokens)
        input_processor = InputProcessor(tokenizer, context=512, vocabulary=259, defaults={})
        model = LoadedModel(
            cast("ModelRunner", runner), tokenizer, input_processor, frozenset({EOS})
        )
        return EngineDriver(model, config), runner

    return make


@pytest.fixture(scope="session")
def tiny_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def noisy(tokenizer: Any) -> Callable[..., EngineDriver]:
    """Make an engine whose model generates random tokens."""

    def make(
        config: SchedulerConfig | None = None, *, special: str = "", template: str = ""
    ) -> EngineDriver:
        tokenizer_copy = copy.deepcopy(tokenizer)
        tokenizer_copy.add_special_tokens(
            {"additional_special_tokens": [special] if special else []}
        )
        tokenizer_copy.chat_template = template or tokenizer_copy.chat_template
        runner = RandomRunner(len(tokenizer_copy))
        input_processor = InputProcessor(
            tokenizer_copy, context=4096, vocabulary=len(tokenizer_copy), defaults={}
        )
        end_tokens = frozenset({tokenizer_copy.eos_token_id})
        return EngineDriver(
            LoadedModel(cast("ModelRunner", runner), tokenizer_copy, input_processor, end_tokens),
            config,
        )

    return make

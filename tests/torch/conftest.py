"""A model of two layers that knows only bytes, and a way to drive an engine by hand."""

import copy
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
    """A token for each byte, and two special ones."""
    vocabulary = {letter: byte for byte, letter in enumerate(_build_byte_letters())}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_llama(**options: Any) -> Any:
    """Random weights, always the same."""
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


class Scripted:
    """Stands for a Forward: after a prompt it says the script, whatever was drawn before."""

    context_length = 512
    vocabulary_size = 259
    cache_bytes_per_token = 0

    def __init__(self, script: Sequence[int], prompt: int, most: int = 1 << 30) -> None:
        self._script = script
        self._prompt = prompt
        self.most = most
        """So many tokens are too many for its memory."""
        self.passes: list[int] = []
        """How many segments each pass had."""

    def __call__(self, segments: Sequence[BatchSegment]) -> torch.Tensor:
        if sum(len(segment.tokens) for segment in segments) > self.most:
            raise RuntimeError("out of memory")
        self.passes.append(len(segments))
        rows = []
        for segment in segments:
            segment.cache.advance(len(segment.tokens))
            if segment.logit_count:
                at = segment.cache.length - self._prompt
                line = torch.zeros(self.vocabulary_size)
                line[self._script[at] if at < len(self._script) else EOS] = 30.0
                rows.append(line)
        return torch.stack(rows) if rows else torch.zeros(0, self.vocabulary_size)


class Noise:
    """Stands for a Forward: any token is as likely as any other, by chance and always the same."""

    context_length = 4096
    cache_bytes_per_token = 0

    def __init__(self, vocabulary: int = 259) -> None:
        self.vocabulary_size = vocabulary

    def __call__(self, segments: Sequence[BatchSegment]) -> torch.Tensor:
        rows = []
        for segment in segments:
            segment.cache.advance(len(segment.tokens))
            if segment.logit_count:
                chance = torch.Generator().manual_seed(segment.cache.length)
                rows.append(torch.randn(self.vocabulary_size, generator=chance))
        return torch.stack(rows) if rows else torch.zeros(0, self.vocabulary_size)


def _job_of(news: Any) -> int:
    job: int = news.request_id
    return job


class Driven:
    """An engine, and what it has told."""

    def __init__(self, model: LoadedModel, limits: SchedulerConfig | None = None) -> None:
        self.now = 0.0
        self.told: list[EngineEvent] = []
        self.woken = threading.Event()
        """Set when the engine should look again."""
        self.engine = TorchEngine(
            model, limits or SchedulerConfig(), self.told.append, lambda: self.now, self.woken.set
        )

    def run(self, *specs: GenerateCommand, steps: int = 1000) -> "Driven":
        """Submit, and step until there is nothing to do."""
        for spec in specs:
            self.engine.submit(spec)
        for _ in range(steps):
            if not self.engine.step():
                if not (self.engine._grammar_manager or self.engine._background_tokenizer):
                    break
                assert self.woken.wait(30)
                self.woken.clear()
        return self

    def of(self, kind: type[T], job: int = 1) -> list[T]:
        """What was told of a job, of this kind."""
        return [one for one in self.told if isinstance(one, kind) and _job_of(one) == job]

    def text(self, job: int = 1, choice: int = 0) -> str:
        """A choice's text."""
        return "".join(p.text for p in self.of(TextEvent, job) if p.choice == choice)

    def ids(self, job: int = 1, choice: int = 0) -> list[int]:
        """A choice's tokens."""
        return [i for p in self.of(TextEvent, job) if p.choice == choice for i in p.ids]

    def ended(self, job: int = 1) -> dict[int, ChoiceEndEvent]:
        """The end of each choice."""
        ends = self.of(ChoiceEndEvent, job)
        assert len({end.choice for end in ends}) == len(ends)
        return {end.choice: end for end in ends}

    def finished(self, job: int = 1) -> RequestFinishedEvent:
        """The one end of a job."""
        (one,) = self.of(RequestFinishedEvent, job)
        return one

    def failed(self, job: int = 1) -> RequestFailedEvent:
        """The one failure of a job."""
        (one,) = self.of(RequestFailedEvent, job)
        return one

    def echo(self, job: int = 1) -> PromptEchoEvent:
        """The one echo of a job."""
        (one,) = self.of(PromptEchoEvent, job)
        return one


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def tiny(tokenizer: Any) -> LoadedModel:
    return assemble_model(ModelRunner(tiny_llama(attn_implementation=ATTENTION_NAME)), tokenizer)


@pytest.fixture(scope="session")
def reference() -> Any:
    """The same model as transformers runs it."""
    return tiny_llama().eval()


@pytest.fixture
def driven(tiny: LoadedModel) -> Callable[..., Driven]:
    return lambda limits=None: Driven(tiny, limits)


@pytest.fixture
def scripted(tokenizer: Any) -> Callable[..., tuple[Driven, Scripted]]:
    """An engine whose model says ``script`` after a prompt of one token."""

    def make(
        script: str | bytes | Sequence[int],
        limits: SchedulerConfig | None = None,
        most: int = 1 << 30,
    ) -> tuple[Driven, Scripted]:
        ids = list(script.encode() if isinstance(script, str) else script)
        forward = Scripted(ids, prompt=1, most=most)
        reader = InputProcessor(tokenizer, context=512, vocabulary=259, defaults={})
        model = LoadedModel(cast("ModelRunner", forward), tokenizer, reader, frozenset({EOS}))
        return Driven(model, limits), forward

    return make


@pytest.fixture(scope="session")
def tiny_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder that can be loaded."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def noisy(tokenizer: Any) -> Callable[..., Driven]:
    """An engine whose model knows nothing, and goes on for long."""

    def make(
        limits: SchedulerConfig | None = None, *, special: str = "", template: str = ""
    ) -> Driven:
        own = copy.deepcopy(tokenizer)
        own.add_special_tokens({"additional_special_tokens": [special] if special else []})
        own.chat_template = template or own.chat_template
        forward = Noise(len(own))
        reader = InputProcessor(own, context=4096, vocabulary=len(own), defaults={})
        ends = frozenset({own.eos_token_id})
        return Driven(LoadedModel(cast("ModelRunner", forward), own, reader, ends), limits)

    return make

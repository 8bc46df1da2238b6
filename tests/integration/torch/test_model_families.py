"""Model families, tiny and with random weights, match transformers' ``generate``.

Each runs alone, in a batch, and with prompts in small prefill chunks: the greedy tokens equal those
of transformers, the log probabilities are within 1e-3, and, except for mixtures of experts, they
are bit for bit the same in all of these cases.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from backends.torch.ipc import (
    EngineSamplingParams,
    GenerateCommand,
    PromptInput,
    RequestFinishedEvent,
    StopParams,
    TextEvent,
)
from backends.torch.loaded_model import LoadedModel, assemble_model
from backends.torch.loader import ModelLocation
from backends.torch.model import ATTENTION_NAME, ModelRunner, load_model_runner
from backends.torch.model_files import ModelError
from backends.torch.scheduler import SchedulerConfig
from tests.support.tiny_model import EngineDriver

COUNT = 24
LENGTHS = (1, 5, 33, 70, 18)
WINDOW = 16
"""Shorter than most prompts and than the texts generated after the others."""

NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    **NO_ENDS,
}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "smollm3": SmolLM3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=24),
    "gemma3": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7}, head_dim=8, sliding_window=WINDOW
    ),
    "gpt2": GPT2Config(
        vocab_size=259, n_embd=32, n_layer=3, n_head=4, n_positions=256, initializer_range=0.3,
        **NO_ENDS,
    ),
    "opt": OPTConfig(
        vocab_size=259, hidden_size=32, ffn_dim=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=256, word_embed_proj_dim=32, init_std=0.3, **{
            **NO_ENDS, "pad_token_id": 1,
        },
    ),
    "gpt-oss": GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=WINDOW
    ),
}  # fmt: skip
MIXTURES = {"gpt-oss"}
"""Their experts take tokens of all rows together, so the last digits depend on the batch."""


def build_model(family: str, attention: str) -> Any:
    torch.manual_seed(4)
    auto: Any = AutoModelForCausalLM
    # Two models with one configuration object would both get the second's attention.
    config = copy.deepcopy(FAMILIES[family])
    model = auto.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "sinks" in name:
                weight.normal_()
    return model


def make_prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(9)
    return [torch.randint(2, 259, (n,), generator=rng).tolist() for n in LENGTHS]


@functools.cache
def compute_reference(family: str) -> list[tuple[list[int], list[float]]]:
    """Return transformers' own tokens and log probabilities for each prompt alone."""
    model = build_model(family, "eager")
    outputs = []
    for prompt in make_prompts():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=COUNT,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = out.sequences[0, len(prompt) :].tolist()
        scores = torch.stack(out.logits)[:, 0].float().log_softmax(-1)
        outputs.append((ids, [float(scores[i, token]) for i, token in enumerate(ids)]))
    return outputs


@pytest.fixture(scope="module", params=FAMILIES)
def family_model(request: pytest.FixtureRequest, tokenizer: Any) -> tuple[str, LoadedModel]:
    family = request.param
    return family, assemble_model(ModelRunner(build_model(family, ATTENTION_NAME)), tokenizer)


def make_command(job: int, prompt: list[int]) -> GenerateCommand:
    return GenerateCommand(
        job,
        PromptInput(prompts=(tuple(prompt),)),
        EngineSamplingParams(temperature=0),
        StopParams(max_tokens=COUNT, ignore_eos=True),
        logprobs=0,
        token_ids=True,
    )


def get_output(driven: EngineDriver, job: int) -> tuple[list[int], list[float | None]]:
    pieces = driven.select(TextEvent, job)
    assert driven.select(RequestFinishedEvent, job)
    ids = [i for piece in pieces for i in piece.ids]
    return ids, [token.logprob for piece in pieces for token in piece.tokens]


def test_tokens_and_logprobs_match_transformers_for_each_family(
    family_model: tuple[str, LoadedModel],
) -> None:
    family, model = family_model
    alone: list[tuple[list[int], list[float | None]]] = []
    for prompt, (ids, scores) in zip(make_prompts(), compute_reference(family), strict=True):
        alone.append(get_output(EngineDriver(model).run(make_command(1, prompt)), 1))
        assert alone[-1][0] == ids
        assert torch.allclose(torch.tensor(alone[-1][1]), torch.tensor(scores), atol=1e-3)
    for chunk in (256, 7):
        batch = [make_command(job, prompt) for job, prompt in enumerate(make_prompts())]
        together = EngineDriver(model, SchedulerConfig(max_chunk_tokens=chunk)).run(*batch)
        outputs = [get_output(together, job) for job in range(len(batch))]
        if family in MIXTURES:
            assert [ids for ids, _ in outputs] == [ids for ids, _ in alone]
        else:
            assert outputs == alone


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1),
        FalconConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
    ],
    ids=["no attention", "attention of its own"],
)
def test_unsupported_model_family_is_rejected_before_loading(tmp_path: Path, config: Any) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="does not use transformers' attention interface"):
        load_model_runner(ModelLocation(str(tmp_path), "generate"), "cpu", "auto", None)

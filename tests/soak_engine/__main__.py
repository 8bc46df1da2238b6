"""``python -m tests.soak_engine --requests 50000``: soaks the engine with a tiny model."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from tests.soak_engine.soak_run import SLACK, check_flat, run_soak
from tests.support.tiny_model import byte_tokenizer, tiny_llama


@click.command()
@click.option("--requests", default=50_000, show_default=True)
@click.option("--checkpoints", default=25, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(requests: int, checkpoints: int, seed: int) -> None:
    """Send requests, cancel some, and measure; after a fifth of them memory must stay flat."""
    with TemporaryDirectory() as place:
        tiny_llama().save_pretrained(Path(place))
        byte_tokenizer().save_pretrained(Path(place))
        done = asyncio.run(run_soak(place, requests, checkpoints, seed))
    check_flat(done.checkpoints, checkpoints // 5)
    click.echo(f"flat within {SLACK >> 20} MB; every request ended once: {dict(done.ends)}")


if __name__ == "__main__":
    main()

"""``interlingua worker``: one local model over HTTP, for gateways."""

import logging
import os
import sys
from functools import partial
from typing import Any

import click

from backends.log_format import LogFormatChoice, format_notice
from gateway.cli.built_in import build_worker_config
from gateway.cli.server_process import (
    LOG_FORMAT_OPTION,
    LOG_LEVEL_OPTION,
    RunOptions,
    run_gateway,
    start_logging,
)
from gateway.config.errors import ConfigError
from gateway.config.loader import load_bytes
from gateway.terminal import print_text
from protocols.core.json_text import encode_ascii


@click.command()
@click.option(
    "--model",
    "path",
    required=True,
    help="A folder, a .gguf file, a Hugging Face name or package:NAME.",
)
@click.option("--name", help="The model's public name; by default, the name of its folder or file.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8001, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1.")
@click.option("--dtype", default="auto", show_default=True)
@click.option(
    "--max-concurrency", type=int, default=16, show_default=True, help="Sequences in a batch."
)
@click.option("--kv-cache-memory", help="Size of the KV cache, such as 4GiB; by default 1GiB.")
@click.option("--context", type=int, help="A context length below the model's own, in tokens.")
@click.option("--queue", type=int, help="Limit of waiting prompts; by default 256.")
@click.option("--prefill-chunk", type=int, help="Prompt tokens in one step; by default 256.")
@click.option("--threads", type=int, help="CPU threads; by default, as many as torch chooses.")
@click.option(
    "--task",
    type=click.Choice(["generate", "embedding", "rerank", "classify"]),
    help="The model's task, if its files do not say it.",
)
@click.option(
    "--key",
    envvar="INTERLINGUA_WORKER_KEY",
    help="The bearer token that gateways must send; prefer the variable INTERLINGUA_WORKER_KEY.",
)
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Listen on other addresses than loopback although there is no key.",
)
@LOG_LEVEL_OPTION
@LOG_FORMAT_OPTION
def worker(log_level: str, log_format: LogFormatChoice, *, insecure: bool, **options: Any) -> None:
    """Serve one local model to gateways, with the OpenAI API and the engine's own parameters.

    While the model is being loaded, requests get status 503. A gateway uses it in a pool with
    `protocol: openai` and `profile: interlingua`.

    Exit codes: 0 stopped, 1 the model can't be served or the port is in use, 2 wrong usage.
    """
    chosen_format = start_logging(log_level, log_format)
    load_config = partial(
        load_bytes,
        encode_ascii(build_worker_config(**options)),
        "<worker>",
        env=os.environ,
        insecure=insecure,
    )
    try:
        initial_config = load_config()
    except ConfigError as error:
        print_text(format_notice(str(error), chosen_format, logging.ERROR), err=True)
        sys.exit(2)
    run_options = RunOptions(wait_for_warmup=True, log_format=chosen_format)
    sys.exit(run_gateway(initial_config, load_config, run_options))

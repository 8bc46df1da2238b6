"""The compared engines: how each is installed, started and used, in its own environment.

Each computes with the same number of threads. ``fp32`` peers have the same weights; the others have
quantized forms of them, see ``weights``.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.bench_engine.weights import Weights

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".bench" / "engine"
"""Environments, weights and logs. Not in git."""
HERE = Path(__file__).parent
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
Command = Callable[[Weights, int, int], Sequence[str | Path]]
"""Returns the command that starts it on a port, with a number of threads."""


class Peer(NamedTuple):
    """An engine for texts or embeddings. ``env`` is its environment's folder; empty is ours."""

    what: str
    form: str
    command: Command
    env: str = ""
    batch: bool = False
    """Whether one call takes an entire batch: a library behind minimal HTTP."""
    vectors: bool = False
    model: str | None = "smollm2"
    """The model's name in requests; None: its folder."""
    endless: bool = True
    """Whether it supports ``ignore_eos``."""
    sizes: Sequence[int] | None = None
    """The numbers of concurrent requests that it is measured with; None: those of the run."""


def build_environment(threads: int) -> dict[str, str]:
    """The environment variables of a peer; ``fronts`` reads the number of threads from there."""
    return {**os.environ, **_VARIABLES, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}


def python(env: str) -> Path:
    """Return the interpreter of an environment."""
    return PLACE / env / "bin" / "python" if env else Path(sys.executable)


def _build_own_command(dtype: str) -> Command:
    def command(weights: Weights, port: int, threads: int) -> Sequence[str | Path]:
        model = weights.q4_0 if dtype == "quantized" else weights.folder
        return _worker(model, port, threads, "--name", "smollm2", "--dtype", dtype)

    return command


def _worker(model: Path, port: int, threads: int, *marker: str) -> Sequence[str | Path]:
    start = (python(""), "-m", "gateway", "worker", "--model", model, "--port", str(port))
    return (*start, "--threads", str(threads), "--log-level", "warning", *marker)


def _front(env: str, kind: str, form: str) -> Command:
    def command(weights: Weights, port: int, _threads: int) -> Sequence[str | Path]:
        return (python(env), HERE / "fronts.py", kind, getattr(weights, form), str(port))

    return command


def _serve(weights: Weights, port: int, _threads: int) -> Sequence[str | Path]:
    start = "from transformers.cli.transformers import main; main()"
    batching = ("--continuous-batching", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "512")
    how = ("--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port))
    return (python("transformers"), "-c", start, "serve", weights.folder, *batching, *how)


def _vllm(weights: Weights, port: int, _threads: int) -> Sequence[str | Path]:
    start = (python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", weights.folder)
    how = ("--served-model-name", "smollm2", "--dtype", "float32", "--enforce-eager")
    most = ("--max-model-len", "512", "--max-num-seqs", "64", "--gpu-memory-utilization", "0.1")
    return (*start, *how, *most, "--no-enable-prefix-caching", "--port", str(port))


PEERS: Mapping[str, Peer] = {
    "ours": Peer("`interlingua worker`", "float32", _build_own_command("float32")),
    "ours-int8": Peer(
        "`interlingua worker --dtype int8`", "int8 per row", _build_own_command("int8")
    ),
    "ours-quantized": Peer(
        "`interlingua worker --dtype quantized`", "Q4_0", _build_own_command("quantized")
    ),
    "generate": Peer(
        "transformers' `generate`",
        "float32",
        _front("", "generate", "folder"),
        batch=True,
    ),
    "generate-batch": Peer(
        "transformers' `generate_batch`",
        "float32",
        _front("", "transformers", "folder"),
        batch=True,
    ),
    "transformers-serve": Peer(
        "`transformers serve --continuous-batching`",
        "float32",
        _serve,
        "transformers",
        model=None,
        endless=False,
    ),
    "vllm": Peer("vLLM on CPU, eager", "float32", _vllm, "vllm"),
    "openvino": Peer(
        "OpenVINO GenAI",
        "Q8_0",
        _front("openvino", "openvino", "q8_0"),
        "openvino",
        batch=True,
    ),
    "llama-q8": Peer(
        "llama.cpp's server (wheel: AVX2)", "Q8_0", _front("llama", "llama", "q8_0"), "llama"
    ),
    "llama-q4": Peer(
        "llama.cpp's server (wheel: AVX2)", "Q4_0", _front("llama", "llama", "q4_0"), "llama"
    ),
    "ours-large": Peer(
        "`interlingua worker --dtype quantized`, 1.5 billion weights",
        "Q4_0",
        lambda weights, port, threads: _worker(
            weights.large, port, threads, "--name", "large", "--dtype", "quantized"
        ),
        model="large",
        sizes=(1,),
    ),
    "llama-large": Peer(
        "llama.cpp's server (wheel: AVX2), 1.5 billion weights",
        "Q4_0",
        _front("llama", "llama", "large"),
        "llama",
        sizes=(1,),
    ),
    "ours-vectors": Peer(
        "`interlingua worker`",
        "float32",
        lambda weights, port, threads: _worker(weights.encoder, port, threads, "--name", "minilm"),
        vectors=True,
        sizes=(1,),
        model="minilm",
    ),
    "sentence-transformers": Peer(
        "sentence-transformers, batches of 32",
        "float32",
        _front("sentence", "sentences", "encoder"),
        "sentence",
        batch=True,
        vectors=True,
        sizes=(1,),
    ),
}


def install(env: str) -> str | None:
    """Install a peer's environment if it is missing. Returns why it can't be installed, or None."""
    folder, wanted = PLACE / env, HERE / "peers" / f"{env}.txt"
    stamp = folder / ".installed"
    if not env or (stamp.exists() and stamp.read_text() == wanted.read_text()):
        return None
    steps: list[Sequence[str | Path]] = [(sys.executable, "-m", "venv", "--clear", folder)]
    how = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:")
    steps.append((python(env), "-m", "pip", "install", *how, "-r", wanted))
    for step in steps:
        done = subprocess.run(step, check=False, capture_output=True, text=True, env=_clean())
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return f"it can't be installed: {lines[-1] if lines else done.returncode}"
    if wanted.read_text().startswith("# beside"):
        _link_packages(folder)
    stamp.write_text(wanted.read_text())
    return None


def _clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PIP_CONS")}


def _link_packages(folder: Path) -> None:
    """Make our packages importable there: torch and transformers are the same for both."""
    site_packages = next(path for path in sys.path if path.endswith("site-packages"))
    (theirs,) = folder.glob("lib/python*/site-packages")
    (theirs / "project.pth").write_text(f"import site; site.addsitedir({site_packages!r})\n")

"""Minimal HTTP servers for engines that are libraries: a batch in, its token count out.

They run in the engine's own environment, so they import nothing of this project: ``python fronts.py
KIND MODEL PORT``.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

Batch = Callable[[list[str], int], int]


def transformers(path: str) -> Batch:
    """The continuous batching of transformers, called as a library."""
    module = importlib.import_module("transformers")
    importlib.import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tokenizer = module.AutoTokenizer.from_pretrained(path)
    model = module.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    model.eval()
    # Like ``generate_batch``, without setting up the engine in each call.
    manager = model.init_continuous_batching(
        generation_config=module.GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=module.ContinuousBatchingConfig(
            num_blocks=256, max_batch_tokens=512
        ),
    )
    manager.start()

    def batch(prompts: list[str], most: int) -> int:
        left = set(
            manager.add_requests(inputs=tokenizer(prompts)["input_ids"], max_new_tokens=most)
        )
        tokens = 0
        while left:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                left.discard(result.request_id)
                tokens += len(result.generated_tokens)
        return tokens

    return batch


def generate(path: str) -> Batch:
    """``generate`` of transformers on one padded batch."""
    module = importlib.import_module("transformers")
    importlib.import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tokenizer = module.AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = module.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()

    def batch(prompts: list[str], most: int) -> int:
        inputs = tokenizer(prompts, padding=True, return_tensors="pt")
        out = model.generate(
            **inputs, max_new_tokens=most, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        return int(out[:, inputs["input_ids"].shape[1] :].numel())

    return batch


def openvino(path: str) -> Batch:
    """OpenVINO GenAI's continuous batching on a GGUF file."""
    module = importlib.import_module("openvino_genai")
    scheduler = module.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    pipe = module.LLMPipeline(
        path,
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_NUM_THREADS=int(os.environ["OMP_NUM_THREADS"]),
        NUM_STREAMS=1,
    )

    def batch(prompts: list[str], most: int) -> int:
        config = module.GenerationConfig()
        config.max_new_tokens = most
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        result = pipe.generate(prompts, config)
        return int(result.perf_metrics.get_num_generated_tokens())

    return batch


def sentences(path: str) -> Batch:
    """sentence-transformers; a text counts as one token."""
    importlib.import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = importlib.import_module("sentence_transformers").SentenceTransformer(path, device="cpu")
    return lambda texts, _: len(model.encode(texts, batch_size=32, show_progress_bar=False))


def llama(path: str, port: int) -> None:
    """llama.cpp's own HTTP server, from a wheel."""
    module = importlib.import_module("xllamacpp")
    params = module.CommonParams()
    params.model.path = path
    params.port = port
    params.n_parallel = 16
    params.n_ctx = 16 * 512
    params.kv_unified = False
    params.cache_prompt = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(
        os.environ["OMP_NUM_THREADS"]
    )
    params.cpuparams.poll = params.cpuparams_batch.poll = 0
    server = module.Server(params)
    while server.listening_address:
        time.sleep(3600)


def _front(batch: Batch) -> type[BaseHTTPRequestHandler]:
    class Front(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request: dict[str, Any] = json.loads(
                self.rfile.read(int(self.headers["Content-Length"]))
            )
            body = json.dumps({"tokens": batch(request["prompts"], request["max_tokens"])}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing, which would cost time."""

    return Front


def main(kind: str, path: str, port: int) -> None:
    """Serve until killed."""
    if kind == "llama":
        llama(path, port)
    kinds = {
        "transformers": transformers,
        "generate": generate,
        "openvino": openvino,
        "sentences": sentences,
    }
    HTTPServer(("127.0.0.1", port), _front(kinds[kind](path))).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""Models are downloaded from a server that answers like the Hugging Face Hub."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": b"w" * 30_000_000,
}
REVISION = "a" * 40
FIND_MODEL = """
import json, sys
from backends.torch.model_files import ModelError
from backends.torch.loader import find_model

def report(text):
    print(json.dumps(["progress", text]))

try:
    location = find_model(sys.argv[1], report)
    print(json.dumps([location.task, location.source]))
except ModelError as error:
    print(json.dumps(["error", str(error)]))
"""


class HubHandler(BaseHTTPRequestHandler):
    """Serves the model org/tiny and answers 404 for any other."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""

    def _answer(self, *, has_body: bool) -> None:
        headers = {"X-Repo-Commit": REVISION}
        file = FILES.get(self.path.rpartition("/")[2])
        status, content = 200, b""
        if "org/tiny" not in self.path:
            status, headers["X-Error-Code"] = 404, "RepoNotFound"
        elif "/tree/" in self.path:
            content = json.dumps([
                {"type": "file", "path": name, "size": len(data), "oid": hash_file(data)}
                for name, data in FILES.items()
            ]).encode()  # fmt: skip
        elif file is not None:
            content, headers["ETag"] = file, f'"{hash_file(file)}"'
        else:
            siblings = [{"rfilename": name} for name in FILES]
            content = json.dumps({"id": "org/tiny", "sha": REVISION, "siblings": siblings}).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(content)


def hash_file(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    """The server's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def find_model(name: str, hub: str, folder: Path) -> list[Any]:
    """Return the progress messages of a download and the model's folder."""
    environment = os.environ | {
        "HF_ENDPOINT": hub, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    output = subprocess.run(
        [sys.executable, "-c", FIND_MODEL, name], env=environment, check=True, capture_output=True
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_model_of_the_hub_is_downloaded_once_with_progress(hub: str, tmp_path: Path) -> None:
    *reports, (task, source) = find_model("org/tiny", hub, tmp_path)
    assert task == "generate"
    assert {file.name: file.read_bytes() for file in Path(source).iterdir()} == FILES

    progress = [text for _, text in reports if text.startswith("downloading org/tiny: ")]
    assert progress[-1] == "downloading org/tiny: 30 of 30 MB"
    assert len(progress) <= 8 + 2 * len(FILES)

    *reports, again = find_model("org/tiny", hub, tmp_path)
    assert again == [task, source]
    assert not any(text.startswith("downloading") for _, text in reports)


def test_model_that_is_not_on_the_hub_is_an_error_that_names_it(hub: str, tmp_path: Path) -> None:
    *_, (kind, text) = find_model("org/unknown", hub, tmp_path)
    assert kind == "error"
    assert "org/unknown is not on the Hugging Face Hub" in text

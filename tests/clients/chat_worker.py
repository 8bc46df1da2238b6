"""A chat completions worker that calls tools by a script.

The number of tool outputs in the conversation selects the step; after the last step it answers with
the outcome. The model's name selects the script.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final

Step = tuple[str, Mapping[str, Any]]
SCRIPTS: Final[Mapping[str, Sequence[Step]]] = {
    # Codex's own tool: it reads and edits a file, and runs a command.
    "coder": (
        ("exec_command", {"cmd": "cat notes.txt"}),
        ("exec_command", {"cmd": "sed -i s/old/new/ notes.txt"}),
        ("exec_command", {"cmd": "wc -w notes.txt"}),
    ),
    "weather": (("get_weather", {"city": "東京"}),),
    "triage": (("transfer_to_expert", {}),),
    "structured": (),
    "plain": (),
}
ENDS: Final[Mapping[str, str]] = {
    "coder": "The file has new text.",
    "weather": "It is sunny in 東京.",
    "triage": "The expert answers.",
    "structured": '{"name":"Ada","age":36}',
    "plain": "Hello world!",
}
_USAGE: Final = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


@contextmanager
def run_chat_worker() -> Iterator[str]:
    """Run the worker on a free loopback port and yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer the model list, which health checks request."""
        models = [{"id": name, "object": "model"} for name in SCRIPTS]
        self._send("application/json", json.dumps({"object": "list", "data": models}).encode())

    def do_POST(self) -> None:
        """Answer with one step of the script."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        steps = SCRIPTS[request["model"]]
        tool_results = sum(message["role"] == "tool" for message in request["messages"])
        if tool_results < len(steps):
            name, arguments = steps[tool_results]
            offered = [tool["function"]["name"] for tool in request.get("tools", ())]
            assert name in offered, f"{name} is not one of {offered}"
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            call = {"id": f"call_worker{tool_results}", "type": "function", "function": function}
            message: dict[str, Any] = {"content": None, "reasoning_content": "I call a tool."}
            message["tool_calls"] = [call]
        else:
            message = {"content": ENDS[request["model"]]}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        if request.get("stream"):
            self._send("text/event-stream", b"".join(_stream(request["model"], message, reason)))
            return
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
        body = {"id": "x", "object": "chat.completion", "created": 1, "model": request["model"]}
        content = json.dumps({**body, "choices": [choice], "usage": _USAGE}).encode()
        self._send("application/json", content)

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Discard the log lines of the server."""


def _stream(model: str, message: Mapping[str, Any], reason: str) -> Iterator[bytes]:
    def chunk(delta: Any, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": model,
                "choices": [choice]}  # fmt: skip

    chunks = []
    if reasoning := message.get("reasoning_content"):
        chunks.append(chunk({"role": "assistant", "reasoning_content": reasoning}))
    for call in message.get("tool_calls", ()):
        function = call["function"]
        begun = call | {"index": 0, "function": {"name": function["name"], "arguments": ""}}
        chunks.append(chunk({"tool_calls": [begun]}))
        for piece in (function["arguments"][:5], function["arguments"][5:]):
            chunks.append(chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}))
    text = message["content"] or ""
    chunks += [chunk({"content": text[at : at + 4]}) for at in range(0, len(text), 4)]
    chunks.append(chunk({}, reason))
    chunks.append(chunk({}) | {"choices": [], "usage": _USAGE})
    for one in chunks:
        yield b"data: " + json.dumps(one).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"

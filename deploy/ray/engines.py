"""The local engine under Ray Serve: replicas that are workers, and a file with their URLs.

Ray places, monitors and restarts the replicas; no request goes through its proxy. Each replica
listens on its own port, like `interlingua worker`, and gateways send requests to it directly.
``WorkerList`` writes the URLs of live replicas to a file, which the gateway's pool watches::

    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0  # single machine, loopback only
    PYTHONPATH=deploy/ray serve run deploy/ray/serve.yaml

Nothing outside this folder depends on Ray.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from msgspec import Struct
from ray import serve
from ray._common.network_utils import build_address
from ray._common.tls_utils import add_port_to_grpc_server
from ray.exceptions import RayError
from ray.serve._private import replica
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from gateway.cli.built_in import build_worker_config
from gateway.config.loader import load_text
from gateway.runtime.gateway import Gateway, build_services

log = logging.getLogger("ray.serve")

KEY_VARIABLE = "INTERLINGUA_WORKER_KEY"
"""The environment variable with the API key of the workers, for replicas and gateways."""
HEARTBEAT_INTERVAL = 1.0
"""Seconds between heartbeats of a replica."""
HEARTBEAT_TIMEOUT = 5.0
"""Seconds without a heartbeat after which a replica is removed from the list."""
ENGINE_TIMEOUT = 60.0
"""Seconds that a replica has to restart its engine process before Ray restarts the replica."""


def _bind_to_node_address() -> None:
    """Bind this replica's internal gRPC port to the node's address instead of all addresses.

    Ray binds it to ``[::]``, and anyone who can reach the port can execute code in the replica.
    Ray itself connects to the node's address only. Ray has no setting for this.
    """
    replica.add_port_to_grpc_server = _add_port


def _add_port(server: Any, address: str) -> int:
    host, port = ray.util.get_node_ip_address(), address.rpartition(":")[2]
    bound: int = add_port_to_grpc_server(server, build_address(host, port))
    return bound


class Arguments(Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments in serve.yaml. Undocumented ones are options of `interlingua worker`."""

    model: str
    file: str
    """Path of the worker list: on the head node, or on a disk shared with the gateway."""
    replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_concurrency: int = 16
    kv_cache_memory: str | None = None
    threads: int | None = None
    task: str | None = None


@serve.deployment(
    ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
    max_ongoing_requests=1000,
    logging_config={"enable_access_log": False},  # it would log every heartbeat
)
class WorkerList:
    """Tracks live replicas by their heartbeats and writes their URLs atomically on each change."""

    def __init__(self, file: str, engines: DeploymentHandle) -> None:
        del engines  # bound only so that Ray starts both deployments
        _bind_to_node_address()
        self._file = Path(file)
        self._seen: dict[str, float] = {}
        self._written: list[str] | None = None
        self._expiry = asyncio.get_running_loop().create_task(self._remove_expired())

    async def heartbeat(self, url: str) -> None:
        """Record a replica's heartbeat."""
        self._seen[url] = time.monotonic()
        self._write()

    async def remove(self, url: str) -> None:
        """Remove a replica that shuts down."""
        self._seen.pop(url, None)
        self._write()

    async def _remove_expired(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            oldest = time.monotonic() - HEARTBEAT_TIMEOUT
            self._seen = {url: seen for url, seen in self._seen.items() if seen > oldest}
            self._write()

    def _write(self) -> None:
        urls = sorted(self._seen)
        if urls == self._written or not urls:
            return  # keep the last list when empty: the gateway detects dead workers itself
        temporary = self._file.with_name(f".{self._file.name}.new")
        temporary.write_bytes(msgspec.json.encode(urls))
        temporary.replace(self._file)
        self._written = urls


@serve.deployment(health_check_period_s=5, graceful_shutdown_timeout_s=70)
class Engine:
    """One replica: a gateway with one local model, in the replica's process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        _bind_to_node_address()
        self._options = options
        self._last_ready = float("inf")
        """When the engine was last ready; infinite before the first time."""
        self._app: Gateway | None = None
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Serve, and send heartbeats until the replica stops."""
        host = ray.util.get_node_ip_address()
        config = build_worker_config(
            **self._options, host=host, port=0, key=os.environ.get(KEY_VARIABLE)
        )
        app = Gateway(
            load_text(msgspec.json.encode(config).decode(), "<worker>", env={}), build_services()
        )
        self._app = app
        (url,) = await app.start(warmed=True)
        log.info("serving %s at %s", self._options["path"], url)
        worker_list: DeploymentHandle = serve.get_deployment_handle("WorkerList")
        try:
            while True:
                if app.backends["engine"].ready:
                    self._last_ready = time.monotonic()
                    await _notify(worker_list.heartbeat, url)
                await asyncio.sleep(HEARTBEAT_INTERVAL)
        finally:
            await _notify(worker_list.remove, url)

    async def check_health(self) -> None:
        """Ray restarts the replica if this fails."""
        if self._running.done():
            self._running.result()
        if time.monotonic() - self._last_ready > ENGINE_TIMEOUT:
            raise RuntimeError(f"the engine has not been ready for {ENGINE_TIMEOUT:g} s")

    async def __del__(self) -> None:
        """Called by Ray to stop the replica; running requests finish."""
        self._running.cancel()
        await asyncio.wait({self._running})
        if self._app is not None:
            await self._app.stop()


async def _notify(method: Any, url: str) -> None:
    """Call the worker list. If it is down, Ray restarts it and a later heartbeat arrives."""
    try:
        async with asyncio.timeout(HEARTBEAT_TIMEOUT):  # during shutdown it may never return
            await method.remote(url)
    except (RayError, RayServeException, TimeoutError) as error:
        log.warning("cannot update the worker list for %s: %r", url, error)


def build(arguments: dict[str, Any]) -> serve.Application:
    """Build the application named in serve.yaml. Raises ValidationError for invalid arguments."""
    parsed = msgspec.convert(arguments, Arguments, strict=False)
    options = msgspec.structs.asdict(parsed)
    file, replicas = options.pop("file"), options.pop("replicas")
    resources = {"num_cpus": options.pop("cpus"), "num_gpus": options.pop("gpus")}
    options["path"] = options.pop("model")
    engine = Engine.options(num_replicas=replicas, ray_actor_options=resources)
    return WorkerList.bind(file, engine.bind(options))

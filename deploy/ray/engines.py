"""Our engine under Ray Serve: replicas that are workers of their own, and a list of where they are.

Ray places the replicas, watches them and starts them anew; no request goes through its proxy. Each
replica listens at a port of its own, as `interlingua worker` does, and a gateway asks it directly.
``Roster`` writes the URLs of those that live into a file, which the gateway's pool watches::

    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0  # this machine alone, on its loopback
    PYTHONPATH=deploy/ray serve run deploy/ray/serve.yaml

Nothing but this folder knows Ray.
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

from gateway.cli.serve import build_worker_config
from gateway.config.loader import load_text
from gateway.runtime.gateway import Gateway, build_services

log = logging.getLogger("ray.serve")

KEY = "INTERLINGUA_WORKER_KEY"
"""The environment's name for what gateways must send, here and where they are."""
EVERY = 1.0
"""Seconds between signs of life."""
PATIENCE = 5.0
"""Seconds without one after which a replica is taken from the list."""
LOST = 60.0
"""Seconds without its engine's process, which it starts anew itself, that a replica is left."""


def _stay_home() -> None:
    """Let this replica's inner port be where its node is, and not at every address there is.

    Ray's own choice is ``[::]``, and whoever reaches that port can make the replica run what he
    likes. Others ask at the node's address alone. There is no setting for it.
    """
    replica.add_port_to_grpc_server = _listen


def _listen(server: Any, address: str) -> int:
    host, port = ray.util.get_node_ip_address(), address.rpartition(":")[2]
    bound: int = add_port_to_grpc_server(server, build_address(host, port))
    return bound


class Told(Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments in serve.yaml; those without a word here are `interlingua worker`'s."""

    model: str
    file: str
    """Where the list is written: on the head's machine, or on a disk that the gateway shares."""
    replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_concurrency: int = 16
    memory: str | None = None
    threads: int | None = None
    task: str | None = None


@serve.deployment(
    ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
    max_ongoing_requests=1000,
    logging_config={"enable_access_log": False},  # a line for each sign of life
)
class Roster:
    """Who lives, by signs of life. What is written is whole, and only where something changed."""

    def __init__(self, file: str, engines: DeploymentHandle) -> None:
        del engines  # to be started with it is all they have in common
        _stay_home()
        self._file = Path(file)
        self._seen: dict[str, float] = {}
        self._written: list[str] | None = None
        self._turning = asyncio.get_running_loop().create_task(self._turn())

    async def lives(self, url: str) -> None:
        """A replica's sign of life."""
        self._seen[url] = time.monotonic()
        self._write()

    async def leaves(self, url: str) -> None:
        """A replica stops, and wants no more requests."""
        self._seen.pop(url, None)
        self._write()

    async def _turn(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            late = time.monotonic() - PATIENCE
            self._seen = {url: seen for url, seen in self._seen.items() if seen > late}
            self._write()

    def _write(self) -> None:
        urls = sorted(self._seen)
        if urls == self._written or not urls:
            return  # an empty list is no list: the gateway sees for itself who is gone
        new = self._file.with_name(f".{self._file.name}.new")
        new.write_bytes(msgspec.json.encode(urls))
        new.replace(self._file)
        self._written = urls


@serve.deployment(health_check_period_s=5, graceful_shutdown_timeout_s=70)
class Engine:
    """One worker: a gateway of one model, within the replica's own process."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        _stay_home()
        self._told = told
        self._seen = float("inf")
        """When the engine was last seen ready, once it was."""
        self._app: Gateway | None = None
        self._living = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> None:
        """Serve, and tell of it until the end."""
        host = ray.util.get_node_ip_address()
        text = build_worker_config(**self._told, host=host, port=0, key=os.environ.get(KEY))
        app = Gateway(
            load_text(msgspec.json.encode(text).decode(), "<worker>", env={}), build_services()
        )
        self._app = app
        (url,) = await app.start(warmed=True)
        log.info("%s serves at %s", self._told["path"], url)
        roster: DeploymentHandle = serve.get_deployment_handle("Roster")
        try:
            while True:
                if app.backends["engine"].ready:
                    self._seen = time.monotonic()
                    await _tell(roster.lives, url)
                await asyncio.sleep(EVERY)
        finally:
            await _tell(roster.leaves, url)

    async def check_health(self) -> None:
        """Ray asks this, and starts a replica anew for which it fails."""
        if self._living.done():
            self._living.result()
        if time.monotonic() - self._seen > LOST:
            raise RuntimeError(f"the engine has been away for {LOST:g} s")

    async def __del__(self) -> None:
        """Ray's way to say that the replica is to stop: what runs comes to its end."""
        self._living.cancel()
        await asyncio.wait({self._living})
        if self._app is not None:
            await self._app.stop()


async def _tell(what: Any, url: str) -> None:
    """Tell the roster. Where it is away itself, Ray brings it back, and the next sign is heard."""
    try:
        async with asyncio.timeout(PATIENCE):  # at the end of all it may never come back
            await what.remote(url)
    except (RayError, RayServeException, TimeoutError) as error:
        log.warning("the roster can't be told of %s: %r", url, error)


def build(arguments: dict[str, Any]) -> serve.Application:
    """The application that serve.yaml names. Raises ValidationError for wrong arguments."""
    told = msgspec.convert(arguments, Told, strict=False)
    worker = msgspec.structs.asdict(told)
    file, replicas = worker.pop("file"), worker.pop("replicas")
    places = {"num_cpus": worker.pop("cpus"), "num_gpus": worker.pop("gpus")}
    worker["path"] = worker.pop("model")
    engine = Engine.options(num_replicas=replicas, ray_actor_options=places)
    return Roster.bind(file, engine.bind(worker))

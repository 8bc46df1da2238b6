"""Several processes serve one configuration as one gateway (faults 47 and 48)."""

import asyncio
import os
import re
import resource
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from gateway.cli import main
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.fault.history import ClientObservation, History, read_logs
from tests.fault.load_generator import LoadGenerator
from tests.fault.processes import WorkerProcess
from tests.fault.protocol_clients import PROTOCOLS
from tests.integration.test_command import Command
from tests.support.waiting import PATIENCE, wait_until

ECHO = {"backend": "echo"}
OTHER = build_config(models={"m": ECHO, "n": ECHO})
TWO = ("--processes", "2")
REQUEST: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HEALTH = {"interval": "100ms", "timeout": "1s", "fall": 1, "rise": 1, "slow_start": "0s"}


def create_two_process_gateway(folder: Path, text: str, *arguments: str) -> GatewayProcess:
    return GatewayProcess(folder, text, *TWO, *arguments)


def list_serving_pids(gateway: GatewayProcess) -> list[int]:
    """Return the ids of the serving processes."""
    pid = gateway.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
    return [int(one) for one in children.split()]


async def sum_metric(gateway: GatewayProcess, name: str) -> float:
    """Return the sum of the metrics of this name."""
    page = await gateway.http.get(f"{gateway.urls[-1]}/metrics")
    assert page.status_code == HTTPStatus.OK
    values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page.text, re.MULTILINE)
    return sum(map(float, values))


async def wait_until_both_serve(gateway: GatewayProcess) -> None:
    """Wait until both processes serve."""
    async with asyncio.timeout(PATIENCE):
        while await sum_metric(gateway, "interlingua_processes") != 2:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)


async def list_models_on_new_connections(gateway: GatewayProcess, times: int) -> set[str]:
    """Return the model lists of this many new connections."""
    models = set()
    for _ in range(times):
        async with httpx.AsyncClient(timeout=30) as client:
            listed = await client.get(f"{gateway.urls[0]}/v1/models")
            models.add(" ".join(one["id"] for one in listed.json()["data"]))
    return models


async def send_chat(gateway: GatewayProcess, **headers: str) -> httpx.Response:
    """Send a chat request on a new connection."""
    async with httpx.AsyncClient(timeout=30) as client:
        url = f"{gateway.urls[0]}/v1/chat/completions"
        return await client.post(url, json=REQUEST, headers=headers)


# --- as one gateway -------------------------------------------------------------------------------


async def test_connections_are_spread_over_processes_and_metrics_are_summed(tmp_path: Path) -> None:
    async with create_two_process_gateway(tmp_path, build_config()) as gateway:
        ids = {(await send_chat(gateway)).headers["x-request-id"] for _ in range(40)}
        assert len(ids) == 40
        assert len({one[:16] for one in ids}) == 2, "each process has its own ids"
        assert await sum_metric(gateway, "interlingua_requests_total") == 40
        assert await sum_metric(gateway, "interlingua_request_duration_seconds_count") == 40
        assert (await gateway.http.get(f"{gateway.urls[-1]}/-/ready")).status_code == HTTPStatus.OK
        assert "HTTP Request:" not in gateway.read_output(), (
            "requests between processes are no news"
        )


async def test_admin_worker_changes_apply_in_all_processes(tmp_path: Path) -> None:
    pool = {"protocol": "openai", "workers": ["http://127.0.0.1:9"], "max_concurrency": 4}
    text = build_config(backends={"p": pool}, models={"m": {"backend": "p"}})
    async with create_two_process_gateway(tmp_path, text) as gateway:
        url = f"{gateway.urls[-1]}/-/workers"
        workers = (await gateway.http.get(url)).json()
        assert [(one["url"], one["limit"]) for one in workers["backends"]["p"]] == [
            ("http://127.0.0.1:9", 4)
        ]

        added = {"backend": "p", "url": "http://127.0.0.1:10", "max_concurrency": 3}
        assert (await gateway.http.post(url, json=added)).status_code == HTTPStatus.CREATED
        assert (await gateway.http.post(url, json=added)).status_code == HTTPStatus.OK

        workers = (await gateway.http.get(url)).json()
        assert len(workers["backends"]["p"]) == 2

        query = {"backend": "p", "url": "http://127.0.0.1:10"}
        gone = await gateway.http.delete(url, params=query)
        assert gone.status_code == HTTPStatus.NO_CONTENT

        again = await gateway.http.delete(url, params=query)
        assert again.status_code == HTTPStatus.NOT_FOUND
        assert again.json()["error"]["field"] == "url"


async def test_explanations_of_any_process_are_found(tmp_path: Path) -> None:
    async with create_two_process_gateway(tmp_path, build_config()) as gateway:
        ids = {
            f"e{n}": await send_chat(gateway, **{"x-interlingua-explain": "1"}) for n in range(12)
        }
        for response in ids.values():
            assert response.status_code == HTTPStatus.OK
            id_ = response.headers["x-request-id"]
            explanation = await gateway.http.get(f"{gateway.urls[-1]}/-/explain/{id_}")
            assert explanation.status_code == HTTPStatus.OK, "either process stops the request"
        lost = await gateway.http.get(f"{gateway.urls[-1]}/-/explain/nobody")

        assert lost.status_code == HTTPStatus.NOT_FOUND

        dry = {"path": "/v1/chat/completions", "body": REQUEST}
        dry_run = await gateway.http.post(f"{gateway.urls[-1]}/-/explain", json=dry)
        assert dry_run.status_code == HTTPStatus.OK, dry_run.text


async def test_supervisor_admin_listener_requires_key_and_limits_body_size(tmp_path: Path) -> None:
    digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
    text = build_config(admin={"address": "127.0.0.1:0", "sha256": digest})
    async with create_two_process_gateway(tmp_path, text) as gateway:
        for path in ("/metrics", "/-/workers", "/-/explain/x"):
            refused = await gateway.http.get(gateway.urls[-1] + path)
            assert refused.status_code == HTTPStatus.UNAUTHORIZED, path
            assert refused.headers["www-authenticate"] == "Bearer"
        assert (await gateway.request_reload()).status_code == HTTPStatus.UNAUTHORIZED

        gateway.http.headers["authorization"] = "Bearer secret"
        assert await sum_metric(gateway, "interlingua_processes") == 2

        large = await gateway.http.post(f"{gateway.urls[-1]}/-/workers", content=b" " * (65 << 10))
        assert large.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE

        table = await gateway.http.get(f"{gateway.urls[-1]}/-/usage?by=key&format=csv")
        assert 'filename="usage.csv"' in table.headers["content-disposition"]


# --- reloads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trigger", ["signal", "path", "watch"])
async def test_reload_applies_in_all_processes_and_in_restarted_ones(
    tmp_path: Path, trigger: str
) -> None:
    options = () if trigger == "watch" else ("--no-watch",)
    async with create_two_process_gateway(tmp_path, build_config(), *options) as gateway:
        gateway.write_config(OTHER)
        if trigger == "signal":
            gateway.send_sighup()
        elif trigger == "path":
            assert (await gateway.request_reload()).status_code == HTTPStatus.OK
        await gateway.wait_until_serving(OTHER)

        assert await list_models_on_new_connections(gateway, 20) == {"m n"}

        os.kill(list_serving_pids(gateway)[0], signal.SIGKILL)
        await wait_until(lambda: "SIGKILL" in gateway.read_output())
        await wait_until_both_serve(gateway)

        assert await list_models_on_new_connections(gateway, 20) == {"m n"}, (
            "who comes later has it too"
        )


async def test_invalid_configuration_changes_no_process(tmp_path: Path) -> None:
    async with create_two_process_gateway(tmp_path, build_config(), "--no-watch") as gateway:
        gateway.write_config(OTHER.replace('"echo"', '"ohce"'))
        response = await gateway.request_reload()

        assert response.status_code == HTTPStatus.UNPROCESSABLE_ENTITY
        assert response.json()["issues"]
        assert (await gateway.read_reload_metrics())['reloads_total{result="failure"}'] == 1
        assert await list_models_on_new_connections(gateway, 20) == {"m"}


async def test_reload_that_fails_in_one_process_is_rolled_back_in_all(tmp_path: Path) -> None:
    here = {"address": "127.0.0.1:0", "protocols": ["openai"]}
    text = build_config(models={"m": ECHO, "n": ECHO}, listeners=[here, here])
    async with create_two_process_gateway(tmp_path, build_config(), "--no-watch") as gateway:
        first = list_serving_pids(gateway)[0]
        soft, hard = resource.prlimit(first, resource.RLIMIT_NOFILE)
        resource.prlimit(first, resource.RLIMIT_NOFILE, (0, hard))
        gateway.write_config(text)
        gateway.send_sighup()  # the admin listener's connections count, too
        await wait_until(lambda: "stays" in gateway.read_output())

        resource.prlimit(first, resource.RLIMIT_NOFILE, (soft, hard))

        assert await list_models_on_new_connections(gateway, 20) == {"m"}
        assert (await gateway.request_reload()).status_code == HTTPStatus.OK, (
            "the reload succeeds now"
        )
        assert await list_models_on_new_connections(gateway, 20) == {"m n"}


async def test_reload_adds_and_removes_listeners_in_all_processes(tmp_path: Path) -> None:
    here = {"address": "127.0.0.1:0", "protocols": ["openai"]}
    both = build_config(listeners=[here, here])
    async with create_two_process_gateway(tmp_path, build_config(), "--no-watch") as gateway:
        gateway.write_config(both)
        assert (await gateway.request_reload()).status_code == HTTPStatus.OK

        await wait_until(lambda: gateway.read_output().count("listening on") == 2)
        [url] = set(re.findall(r"listening on ([^\s\"]+)", gateway.read_output()))
        assert (await gateway.http.get(f"{url}/health")).status_code == HTTPStatus.OK

        taken = build_config(listeners=[here, here | {"address": f"127.0.0.1:{gateway.port}"}])
        gateway.write_config(taken)
        response = await gateway.request_reload()

        assert response.status_code == HTTPStatus.UNPROCESSABLE_ENTITY
        assert "can't listen there" in response.text

        gateway.write_config(build_config())
        assert (await gateway.request_reload()).status_code == HTTPStatus.OK
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(timeout=30) as client:
                await client.get(f"{url}/health")


async def test_reload_rejects_restart_settings_and_local_models(tmp_path: Path) -> None:
    local = {"kind": "torch", "path": "org/model"}
    models = {"m": {"backend": "l"}}
    async with create_two_process_gateway(tmp_path, build_config(), "--no-watch") as gateway:
        gateway.write_config(build_config(admin=None))
        assert "restart it" in (await gateway.request_reload()).text

        gateway.write_config(build_config(backends={"l": local}, models=models))
        assert "each process would load this model" in (await gateway.request_reload()).text


@pytest.mark.slow
async def test_hanging_process_is_replaced_and_does_not_block_a_reload(tmp_path: Path) -> None:
    other = build_config(models={"m": ECHO, "n": ECHO}, limits={"warmup_timeout": "0s"})
    async with create_two_process_gateway(tmp_path, build_config(), "--no-watch") as gateway:
        os.kill(list_serving_pids(gateway)[0], signal.SIGSTOP)
        gateway.write_config(other)
        gateway.send_sighup()
        await wait_until(lambda: "SIGKILL" in gateway.read_output())
        await gateway.wait_until_serving(other)

        await wait_until_both_serve(gateway)

        assert await list_models_on_new_connections(gateway, 20) == {"m n"}


# --- start and stop -------------------------------------------------------------------------------


@pytest.mark.fault(47)
async def test_sigterm_drains_all_processes_without_losing_streams(tmp_path: Path) -> None:
    echo = {"kind": "echo", "script": ["a "] * 10, "delay": "100ms"}
    async with create_two_process_gateway(
        tmp_path, build_config(backends={"echo": echo})
    ) as gateway:
        begun = asyncio.Event()

        async def stream() -> bytes:
            received = b""
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    f"{gateway.urls[0]}/v1/chat/completions", json=REQUEST | {"stream": True}
                ) as response,
            ):
                async for data in response.content.iter_any():
                    received += data
                    outcomes.add(asyncio.current_task())
                    if len(outcomes) == 24:
                        begun.set()
            return received

        outcomes = set[Any]()
        tasks = [asyncio.create_task(stream()) for _ in range(24)]
        await begun.wait()
        gateway.process.send_signal(signal.SIGTERM)

        whole = await asyncio.gather(*tasks)

        assert [one.count(b'"a "') for one in whole] == [10] * 24
        assert all(one.endswith(b"data: [DONE]\n\n") for one in whole)

        await wait_until(lambda: gateway.process.poll() is not None)


async def test_second_sigterm_ends_all_processes_at_once(tmp_path: Path) -> None:
    echo = {"kind": "echo", "script": ["a "], "delay": "60s"}
    gateway = create_two_process_gateway(tmp_path, build_config(backends={"echo": echo}))
    async with gateway:
        task = asyncio.create_task(send_chat(gateway))
        async with asyncio.timeout(PATIENCE):
            while not any(_has_connection(pid, gateway.port) for pid in list_serving_pids(gateway)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        children = list_serving_pids(gateway)
        gateway.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: "Send the signal again" in gateway.read_output())
        gateway.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: gateway.process.poll() is not None)

        assert gateway.process.returncode == -signal.SIGTERM

        await wait_until(lambda: not any(map(_is_running, children)))
        with pytest.raises(httpx.HTTPError):
            await task

        gateway.process.returncode = 0  # as GatewayProcess would have it at the end


@pytest.mark.fault(48)
def build_pool_config(worker: WorkerProcess) -> str:
    """Serve m in every protocol by this worker."""
    return build_config(
        backends={"p": {"protocol": "openai", "workers": [worker.url], "health": HEALTH}},
        models={"m": {"backend": "p"}},
        listeners=[{"address": "127.0.0.1:0", "protocols": PROTOCOLS}],
    )


def check_only_running_requests_were_cut(
    history: History, until_restart: Sequence[ClientObservation]
) -> None:
    """The killed process cut its running requests and lost its last log lines, no more."""
    cut = {one.id for one in history.observations if one.seen == "cut"}
    assert cut, "the killed process had no running request"

    unwritten = {one.id for one in until_restart} - {record.id for record in history.records}
    wrong = [one for one in history.violations() if one.id not in cut]
    assert {one.id for one in wrong if one.kind == "not recorded"} <= unwritten
    assert [one for one in wrong if one.kind != "not recorded"] == []
    assert {one.seen for one in history.observations} == {"complete", "cut"}


@pytest.mark.fault(48)
async def test_killed_process_is_restarted_while_the_others_serve(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    async with WorkerProcess(pace=0.03, words=12, log=log) as worker:
        async with (
            create_two_process_gateway(tmp_path, build_pool_config(worker)) as gateway,
            LoadGenerator(gateway.port) as load,
        ):
            over = asyncio.Event()
            running = asyncio.create_task(load.run(60, over))
            await wait_until(lambda: len(load.observations) > 20)
            request_count = await sum_metric(gateway, "interlingua_requests_total")
            os.kill(list_serving_pids(gateway)[0], signal.SIGKILL)
            await wait_until(lambda: "restarting it in" in gateway.read_output())

            assert await sum_metric(gateway, "interlingua_requests_total") >= request_count

            await wait_until_both_serve(gateway)
            before = len(load.observations)
            await wait_until(lambda: len(load.observations) > before + 30)
            over.set()
            await running

            assert await sum_metric(gateway, "interlingua_process_restarts_total") == 1

            worker.process.send_signal(signal.SIGINT)
            await worker.ended()
        history = History(load.observations, gateway.read_records(), read_logs([log]))

        check_only_running_requests_were_cut(history, load.observations[:before])
        assert all(one.seen == "complete" for one in load.observations[before:])


async def test_serving_processes_end_with_their_supervisor(tmp_path: Path) -> None:
    gateway = create_two_process_gateway(tmp_path, build_config())
    async with gateway:
        children = list_serving_pids(gateway)
        assert len(children) == 2

        gateway.process.kill()
        await wait_until(lambda: not any(map(_is_running, children)))
        gateway.process.wait()
        gateway.process.returncode = 0  # as above


@pytest.fixture
def crash_environment(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """An environment in which serving processes exit at once while a file exists."""
    sign = tmp_path / "broken"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if 'gateway.multiprocess.process' in sys.orig_argv and os.path.exists({str(sign)!r}):\n"
        "    os._exit(3)\n"
    )
    return {"PYTHONPATH": str(tmp_path), "PORT": "0"}, sign


def test_process_that_crashes_at_start_is_not_restarted(
    crash_environment: tuple[dict[str, str], Path],
) -> None:
    env, sign = crash_environment
    sign.touch()
    command = Command("serve", "conformance", *TWO, env=env | {"ALONE_PORT": "0"})
    try:
        assert command.ended() == 1
        assert (
            "interlingua can't serve: the process ended at start with exit code 3"
            in command.read_output()
        )
    finally:
        command.close()


async def test_supervisor_exits_when_no_process_can_be_restarted(
    crash_environment: tuple[dict[str, str], Path],
) -> None:
    env, sign = crash_environment
    command = Command("serve", "conformance", *TWO, env=env | {"ALONE_PORT": "0"})
    try:
        command.serving()
        pid = command.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
        sign.touch()
        for one in children:
            os.kill(int(one), signal.SIGKILL)
        await wait_until(lambda: command.process.poll() is not None)
        assert command.process.returncode == 1
        assert "no process is left; the last error: the process ended at" in command.read_output()
    finally:
        command.close()


def test_port_in_use_ends_the_start_with_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        here = [{"address": f"127.0.0.1:{port}", "protocols": ["openai"]}]
        file.write_text(build_config(listeners=here))
        command = Command("serve", str(file), *TWO)
        try:
            assert command.ended() == 1
            assert "can't serve: [Errno 98]" in command.read_output()
        finally:
            command.close()


def test_local_model_with_several_processes_is_rejected_with_a_hint(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    local = {"kind": "torch", "path": "org/model"}
    file.write_text(build_config(backends={"l": local}, models={"m": {"backend": "l"}}))
    command = Command("serve", str(file), *TWO)
    try:
        assert command.ended() == 1
        assert re.search(
            rf"{re.escape(str(file))}:\d+:\d+: each process would", command.read_output()
        )
        assert "interlingua worker" in command.read_output()
    finally:
        command.close()


@pytest.mark.parametrize("count", ["0", "257", "many", "-1"])
def test_invalid_process_count_is_a_usage_error(count: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["serve", "--processes", count])
    assert refused.value.code == 2


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text("ascii")
    return False


def _has_connection(pid: int, port: int) -> bool:
    """Return whether the process has a connection on this port."""
    inodes = set()
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            inodes |= set(re.findall(r"socket:\[(\d+)\]", str(one.readlink())))
    lines = Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]
    rows = (line.split() for line in lines)
    return any(
        row[1].endswith(f":{port:04X}") and row[3] == "01" and row[9] in inodes for row in rows
    )

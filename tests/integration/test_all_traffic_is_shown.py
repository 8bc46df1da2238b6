"""The status counts every request of a target: answered, answered by its fallback, and copies."""

import asyncio
from pathlib import Path
from typing import Any

from tests.integration.test_admin_status import RunningGateway, run_gateway
from tests.support.waiting import PATIENCE

CONFIG = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
admin: {address: "127.0.0.1:0"}
backends:
  dead: {protocol: openai, workers: ["http://127.0.0.1:9"], health: {interval: 1h}}
  live: {kind: echo}
  copied: {kind: echo}
models:
  chat: {backend: dead, fallback: [spare]}
  spare: {backend: live}
  main: {backend: live, shadow: {to: candidate, share: 100%}}
  candidate: {backend: copied}
"""


async def wait_for_stats(gateway: RunningGateway, targets: int) -> list[dict[str, Any]]:
    """The statistics, as soon as this number of targets has some."""
    async with asyncio.timeout(PATIENCE):
        while True:
            stats: list[dict[str, Any]] = (await gateway.admin.get("/-/status")).json()["stats"]
            if len(stats) == targets:
                return stats
            await asyncio.sleep(0.01)


async def test_targets_that_answer_no_client_show_their_requests(tmp_path: Path) -> None:
    async with run_gateway(tmp_path, CONFIG) as gateway:
        assert (await gateway.chat("chat")).status_code == 200
        assert (await gateway.chat("main")).status_code == 200
        stats = await wait_for_stats(gateway, targets=4)  # the copy may end later

    counts = {
        one["model"]: (one["requests"], one["answered_by_fallback"], one["shadow_requests"])
        for one in stats
    }
    assert counts == {
        "chat": (0, 1, 0),
        "spare": (1, 0, 0),
        "main": (1, 0, 0),
        "candidate": (0, 0, 1),
    }


async def test_record_of_a_fallback_names_no_worker_of_the_target_that_failed(
    tmp_path: Path,
) -> None:
    async with run_gateway(tmp_path, CONFIG) as gateway:
        await gateway.chat("chat")

        [record] = gateway.records

    assert (record.model, record.backend, record.worker) == ("spare", "live", "")
    assert [failure.worker for failure in record.worker_failures] == ["http://127.0.0.1:9"]

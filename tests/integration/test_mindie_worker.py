"""Workers that are asked to stop, and that say how much they take: gateways themselves."""

import pytest

from tests.conftest import Running, Serve
from tests.integration.test_end_to_end import WAYS, Way, leave_early, until

FRONT = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, databricks, triton, ovms, {{name: mindie, prefix: /mindie}}]
limits: {{drain_timeout: 1s}}
backends:
  pool: {{protocol: mindie, workers: ["{url}/mindie"], health: {{interval: 1h}}}}
models:
  "*": {{backend: pool}}
  mock-slow: {{backend: pool}}
"""


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_a_client_that_leaves_has_the_worker_told_to_stop(
    serve: Serve, mock: Running, way: Way
) -> None:
    front = await serve(FRONT.format(url=mock.url))
    front.app.backends["mock-slow"] = mock.app.backends["mock-slow"]

    await leave_early(front, way, stream=True)

    await until(lambda: "cancelled" in {record.outcome for record in mock.records})
    await until(lambda: any(one.path.endswith("/stopInfer") for one in mock.records))


async def test_a_worker_is_given_no_more_than_the_slots_that_it_has(
    serve: Serve, mock: Running
) -> None:
    front = await serve(FRONT.format(url=mock.url))
    slots = (await mock.http.get("/mindie/v2/models/mock-slow/getSlotCount")).json()

    pool = front.app.backends["pool"]
    await until(lambda: pool.report_workers()[0].limit == slots["total_slots"])  # type: ignore[attr-defined]

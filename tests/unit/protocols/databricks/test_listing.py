"""The list of serving endpoints."""

import msgspec

from protocols.core.catalog import ModelInfo, VersionInfo
from protocols.core.request import GenerationRequest
from protocols.databricks.listing import build_endpoint_details


def test_endpoint_without_shares_has_no_traffic_config() -> None:
    info = ModelInfo("m", (VersionInfo("1", "m", None), VersionInfo("2", "m", None)))
    config = msgspec.to_builtins(build_endpoint_details(info))["config"]

    assert "traffic_config" not in config
    assert [entity["entity_name"] for entity in config["served_entities"]] == ["m", "m"]


def test_samples_are_counted_over_all_prompts() -> None:
    request = GenerationRequest(model="m", kind="completion", prompts=("a", "b"), n=2, best_of=3)
    assert (request.choice_count, request.sample_count) == (4, 6)

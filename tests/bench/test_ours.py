"""The gateway under test: its configuration in each revision's words."""

from pathlib import Path

import pytest
import yaml

from tests.bench import ours
from tests.bench.targets import Seat
from tests.bench.traffic import KEYS, MODELS


@pytest.fixture
def seat(tmp_path: Path) -> Seat:
    return Seat(43210, 54321, tmp_path, 43211)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("gateway/core", ("dialects", "dialect", "front", "reference")),
        ("protocols/core", ("protocols", "protocol", "http_server", "aiohttp")),
    ],
)
def test_a_configuration_has_the_words_of_its_revision(
    tmp_path: Path, seat: Seat, folder: str, words: tuple[str, str, str, str]
) -> None:
    protocols, protocol, server, aiohttp = words
    tree = tmp_path / "tree"
    (tree / folder).mkdir(parents=True)
    begun = ours.start(seat, tree, aiohttp=True)
    assert begun.folder == tree
    assert begun.environment == {"PYTHONPATH": str(tree)}
    config = yaml.safe_load((tmp_path / "gateway.yaml").read_text("utf-8"))
    [listener] = config["listeners"]
    assert listener[protocols][0] == "openai"
    assert listener[server] == aiohttp
    assert [backend[protocol] for backend in config["backends"].values()] == ["openai", "triton"]
    assert len(config["keys"]) == len(KEYS)
    assert len(config["models"]) == 2 * (len(MODELS) + 1)
    ours.start(seat, tree)
    [listener] = yaml.safe_load((tmp_path / "gateway.yaml").read_text("utf-8"))["listeners"]
    assert server not in listener

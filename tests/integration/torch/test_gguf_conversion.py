"""A GGUF file is converted once, and completely or not at all."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.torch import gguf_conversion
from backends.torch.gguf_conversion import convert_gguf
from backends.torch.loader import find_model, load_pretrained, load_weights
from backends.torch.model_files import ModelError
from tests.integration.torch.tiny_gguf import write_gguf
from tests.support.tiny_model import byte_tokenizer, tiny_llama

ROOT = Path(__file__).parents[3]


def ignore_text(text: str) -> None:
    del text


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTERLINGUA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf")


def start_python(code: str, *arguments: str, **how: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, **how)


def test_converted_gguf_model_equals_the_original(cache: Path, gguf_file: Path) -> None:
    messages: list[str] = []
    location = find_model(str(gguf_file), messages.append)

    assert location.task == "generate"
    assert Path(location.source).parent == cache
    assert [text.partition(":")[2].strip()[:11] for text in messages if "once" in text] == [
        "the tokeniz", "the weights", "writing 0 M",
    ]  # fmt: skip

    ids = torch.arange(20)[None]
    model = load_weights(AutoModelForCausalLM, location, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, tiny_llama().eval()(ids).logits)
    assert load_pretrained(AutoTokenizer, location).encode("né") == byte_tokenizer().encode("né")

    again: list[str] = []
    assert find_model(str(gguf_file), again.append) == location
    assert [text for text in again if "once" in text] == []


def test_conversion_reports_read_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_conversion, "_READ_BYTES", 1)
    messages: list[str] = []
    gguf_file = tmp_path / "x.gguf"

    gguf_file.write_bytes(b"0123456789")

    with pytest.raises(ModelError, match="can't read"):
        convert_gguf(gguf_file, tmp_path / "cache", messages.append)
    assert [text.rpartition(": ")[2] for text in messages if "%" in text] == [
        f"{done}0 % read" for done in (2, 3, 4, 5, 7, 8, 9)
    ]


def test_concurrent_conversions_run_only_once(
    cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, conversions = threading.Event(), threading.Event(), []
    messages: list[str] = []

    def convert(_: Path, folder: Path, report: Any) -> None:
        begun.set()
        go.wait(30)
        (folder / "config.json").write_text("{}")
        conversions.append(folder)
        report("done")

    monkeypatch.setattr(gguf_conversion, "_convert_file", convert)
    paths: list[Path] = []
    first = threading.Thread(
        target=lambda: paths.append(convert_gguf(gguf_file, cache, ignore_text))
    )
    first.start()

    assert begun.wait(30)

    def waits(text: str) -> None:
        messages.append(text)
        if "waiting" in text:
            go.set()

    paths.append(convert_gguf(gguf_file, cache, waits))
    first.join()
    assert "another process is converting it: waiting" in messages
    assert len(conversions) == 1
    assert paths[0] == paths[1]
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [paths[0].name]


def test_crash_during_conversion_leaves_no_partial_model(cache: Path, gguf_file: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from backends.torch import gguf_conversion\n"
        "def convert(file, folder, report):\n"
        "    (folder / 'config.json').write_text('half')\n"
        "    print('half', flush=True); time.sleep(60)\n"
        "gguf_conversion._convert_file = convert\n"
        "gguf_conversion.convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), lambda text: None)\n"
    )
    one = start_python(code, str(gguf_file), str(cache), stdout=subprocess.PIPE)
    assert one.stdout is not None
    assert one.stdout.readline() == b"half\n"

    one.send_signal(signal.SIGKILL)
    one.communicate()
    (left,) = [p for p in cache.iterdir() if p.is_dir()]

    assert left.name.startswith(".converting-")

    folder = convert_gguf(gguf_file, cache, ignore_text)
    assert [p for p in cache.iterdir() if p.is_dir()] == [folder]
    assert (folder / "config.json").read_text() != "half"


def test_invalid_gguf_file_leaves_no_files_in_the_cache(cache: Path, tmp_path: Path) -> None:
    gguf_file = tmp_path / "x.gguf"
    gguf_file.write_bytes(b"no model at all, but long enough to be read as a header of one")

    with pytest.raises(ModelError, match=r"x\.gguf is no GGUF file"):
        find_model(str(gguf_file), ignore_text)
    assert [p for p in cache.glob("*") if p.is_dir()] == []


def test_insufficient_disk_space_is_reported_before_the_conversion(
    cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    with pytest.raises(
        ModelError, match=r"not enough disk space to convert into .*: 0 MB are needed"
    ):
        find_model(str(gguf_file), ignore_text)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_insufficient_memory_is_reported_before_the_conversion(
    cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_conversion, "get_free_memory", lambda _: 1_000_000)
    with pytest.raises(ModelError, match=r"converting x\.gguf needs 1 MB of memory, and 1 MB are"):
        find_model(str(gguf_file), ignore_text)
    assert [p for p in cache.iterdir() if p.is_dir()] == []

    monkeypatch.setattr(gguf_conversion, "get_free_memory", lambda _: None)
    assert find_model(str(gguf_file), ignore_text).task == "generate"


def test_disk_full_during_conversion_is_an_error_without_partial_files(
    tmp_path: Path, gguf_file: Path
) -> None:
    """A limit on the file size stands for a full disk, which would need a mount."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from backends.torch import gguf_conversion\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    file, cache = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "    gguf_conversion.convert_gguf(file, cache, lambda text: None)\n"
        "except gguf_conversion.ModelError as error:\n"
        "    Path(sys.argv[3]).write_text(str(error))\n"
    )
    cache, output = tmp_path / "cache", tmp_path / "output"

    one = start_python(code, str(gguf_file), str(cache), str(output), stderr=subprocess.DEVNULL)

    assert one.wait(60) == 0
    assert "can't be written" in output.read_text()
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_unusable_cache_folder_is_an_error(tmp_path: Path, gguf_file: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match=r"x\.gguf can't be converted into"):
        convert_gguf(gguf_file, tmp_path / "cache", ignore_text)

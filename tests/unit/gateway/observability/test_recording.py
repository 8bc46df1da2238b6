"""Recordings are written and read back; damaged lines are skipped."""

import gzip
from pathlib import Path
from typing import Final

import msgspec
import pytest

from gateway.observability import recording
from gateway.observability.recording import (
    RecordedAnswer,
    RecordedChoice,
    RecordedRequest,
    RecordedToolCall,
    RecordedUsage,
    encode_recorded_request,
    read_recordings,
)

RECORDED: Final = RecordedRequest(
    id="one",
    at=1.5,
    protocol="openai",
    request={"model": "chat"},
    events=[(0.25, "data: [DONE]\n\n"), (0.5, 14)],
    answer=RecordedAnswer([RecordedChoice("hello", tool_calls=[RecordedToolCall("f", "{}")])]),
    usage=RecordedUsage(3, 2, "worker"),
)


def test_line_is_read_back(tmp_path: Path) -> None:
    """Every field survives; the line is a JSON object with the format's version."""
    line = encode_recorded_request(RECORDED)
    (tmp_path / "a.jsonl").write_bytes(line)

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line)["format"] == 1
    assert [*read_recordings(tmp_path)] == [RECORDED]
    assert [*read_recordings(tmp_path / "a.jsonl")] == [RECORDED]


def test_folder_is_read_in_order(tmp_path: Path) -> None:
    """Plain and compressed files are read, oldest first; one that has both forms is read once."""
    lines = [encode_recorded_request(msgspec.structs.replace(RECORDED, id=n)) for n in "abc"]
    (tmp_path / "interlingua-1.jsonl.gz").write_bytes(gzip.compress(lines[0]))
    (tmp_path / "interlingua-1.jsonl").write_bytes(lines[0])
    (tmp_path / "interlingua-2.jsonl").write_bytes(lines[1])
    (tmp_path / "interlingua-3.jsonl.gz").write_bytes(gzip.compress(lines[2]))

    (tmp_path / "interlingua-4.jsonl.gz.part").write_bytes(b"not complete")

    assert [one.id for one in read_recordings(tmp_path)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "a\u202e"}, {"id": "a\r\nx: y"}, {"path": "/v1/\x00"}, {"query": "a=\r\n"},
        {"method": "POST / HTTP/1.1\r\n"},
    ],
)  # fmt: skip
def test_line_that_no_gateway_has_written_is_skipped(
    tmp_path: Path, fields: dict[str, str]
) -> None:
    """A replay would send it."""
    forged = msgspec.structs.replace(RECORDED, **fields)
    lines = encode_recorded_request(forged) + encode_recorded_request(RECORDED)
    (tmp_path / "a.jsonl").write_bytes(lines)
    reader = read_recordings(tmp_path)

    assert [*reader] == [RECORDED]
    assert reader.skipped_lines == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_cut_off_file_is_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    """The complete lines of a killed process are read, and the damaged one is counted."""
    line = encode_recorded_request(RECORDED)
    data = line + line[: len(line) // 2]
    if suffix.endswith("gz"):
        data = gzip.compress(line * 2 + line)[:-12]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)

    reader = read_recordings(path)

    assert {one.id for one in reader} <= {"one"}
    assert reader.skipped_lines == 1


def test_unknown_fields_and_other_lines_are_skipped(tmp_path: Path) -> None:
    """A later version may add fields; a line without required fields is counted."""
    (tmp_path / "a.jsonl").write_bytes(
        b'{"format":2,"id":"x","at":1,"later":[{}]}\n\n{"at":1}\n\xff\n'
    )
    reader = read_recordings(tmp_path)

    assert [(one.id, one.format) for one in reader] == [("x", 2)]
    assert reader.skipped_lines == 2


def test_missing_recording_is_an_error(tmp_path: Path) -> None:
    """A path that does not exist is not an empty recording."""
    with pytest.raises(FileNotFoundError):
        read_recordings(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("limit", "content"),
    [
        ("MAX_DECOMPRESSED", b"\0"),
        ("MAX_DECOMPRESSED", encode_recorded_request(RECORDED)),
        ("MAX_LINES", b"\n"),
        ("MAX_LINES", encode_recorded_request(RECORDED)),
    ],
)
def test_file_that_decompresses_to_too_much_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, content: bytes
) -> None:
    """A gateway begins another file long before; each line of such a file may be short."""
    most = 10 * len(content) if limit == "MAX_DECOMPRESSED" else 11  # with the end
    monkeypatch.setattr(recording, limit, most)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(content * 10)
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(content * 12)

    assert len([*read_recordings(tmp_path / "a.jsonl.gz")]) in {0, 10}
    with pytest.raises(OSError, match="decompresses to more") as caught:
        [*read_recordings(tmp_path / "b.jsonl.gz")]
    assert caught.value.filename == str(tmp_path / "b.jsonl.gz")


def test_line_that_is_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted, never held in memory as a whole, and the lines around it are read."""
    line = encode_recorded_request(RECORDED)
    monkeypatch.setattr(recording, "MAX_LINE", len(line))
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(line + b" " * 10 * len(line) + b"\n" + line + b" " * 2 * len(line))

    reader = read_recordings(tmp_path)

    assert [*reader] == [RECORDED, RECORDED]
    assert reader.skipped_lines == 2

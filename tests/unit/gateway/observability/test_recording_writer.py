"""Recording files: rotation, retention, limits, permissions, failures, and their lines."""

import errno
import fcntl
import gzip
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config.schema import RecordConfig, RedactionConfig
from gateway.observability import recording_writer
from gateway.observability.record import RequestRecord
from gateway.observability.recording import RecordedChoice, encode_recorded_request, read_recordings
from gateway.observability.recording_folder import RecordingFolder
from gateway.observability.recording_writer import (
    CapturedRequest,
    RequestRecorder,
    build_recorded_request,
    fold_answer,
)
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    ReasoningDelta,
    RefusalDelta,
    RelevanceScore,
    StreamEnd,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.loss import UnsupportedParameter

LINE = b'{"id":"a","at":1}\n'


class Clock:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.time = time.time()

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Iterator[RequestRecorder]:
    """Create a recorder that is closed at the end."""
    one = RequestRecorder(clock)
    yield one
    one.close(5)


def make_config(to: Path, **fields: Any) -> RecordConfig:
    return RecordConfig(to=str(to), **fields)


def make_folder(path: Path, now: Callable[[], float], **fields: Any) -> RecordingFolder:
    folder = RecordingFolder(str(path), now)
    folder.configure(make_config(path, **fields))
    return folder


def capture(recorder: RequestRecorder, config: RecordConfig, **fields: Any) -> CapturedRequest:
    record = fields.pop("record", None) or RequestRecord("id-1", 5.0, "openai", model="chat")
    return CapturedRequest(
        policy=recorder.create_policy(config),
        record=record,
        method="POST",
        path="/v1/chat/completions",
        headers={},
        **fields,
    )


def list_names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


# --- lines ----------------------------------------------------------------------------------------


def test_full_bodies_are_written_as_they_are(tmp_path: Path, recorder: RequestRecorder) -> None:
    """JSON is written on one line whatever its whitespace; anything else as text."""
    config = make_config(tmp_path, bodies="full")
    body = '{\n "a": "b\\nc é",\r\n "n": 12345678901234567890\n}'.encode()
    captured = capture(
        recorder, config, body=body, body_size=len(body), response=b"not json \xff", response_size=9
    )
    line = encode_recorded_request(build_recorded_request(captured))

    assert line.count(b"\n") == 1

    recorded = msgspec.json.decode(line)
    assert recorded["request"] == {"a": "b\nc é", "n": 12345678901234567890}
    assert (recorded["request_size"], recorded["response_size"]) == (len(body), 9)
    assert recorded["response_text"] == "not json \ufffd"
    assert "response" not in recorded


def test_redacted_stream_has_no_text_but_its_answer(
    tmp_path: Path, recorder: RequestRecorder
) -> None:
    """A secret that is split between two events is redacted in the aggregated response."""
    captured = capture(
        recorder,
        make_config(tmp_path),
        body=b'{"a": "x@y.example"}',
        chunks=[(0.1, b"data: anna@exa\n\n"), (0.2, b"data: mple.org\n\n")],
        events=[TextDelta("I am anna@exa"), TextDelta("mple.org"), ChoiceEnd("eos")],
    )
    recorded = build_recorded_request(captured)

    assert recorded.events == [(0.1, 16), (0.2, 16)]
    assert recorded.request == {"a": "[redacted:email]"}
    assert recorded.answer is not None
    assert recorded.answer.choices == [RecordedChoice("I am [redacted:email]", finish_reason="eos")]
    assert recorded.redacted == ["request.a", "answer.choices[0].text"]


def test_answer_without_its_hidden_choices_is_left_out(
    tmp_path: Path, recorder: RequestRecorder
) -> None:
    """A redaction rule may replace a required field: the rest of the record is written."""
    config = make_config(tmp_path, redact=RedactionConfig(fields=("choices",)))
    captured = capture(
        recorder, config, response=b'{"choices": ["secret"], "id": 1}', events=[TextDelta("secret")]
    )
    recorded = build_recorded_request(captured)

    assert recorded.answer is None
    assert recorded.response == {"choices": "[redacted:field]", "id": 1}


def test_redacted_text_that_is_no_json_is_not_written(
    tmp_path: Path, recorder: RequestRecorder
) -> None:
    """Its fields can't be redacted, so only its size remains."""
    config = make_config(tmp_path)
    recorded = build_recorded_request(capture(recorder, config, body=b'{"password": "x"'))
    assert (recorded.request, recorded.request_text) == (None, "[redacted:16 bytes]")


def test_what_clients_name_is_redacted_everywhere(
    tmp_path: Path, recorder: RequestRecorder
) -> None:
    """Headers, the path and unsupported parameters come from clients, too."""
    secret = "anna@example.org"
    record = RequestRecord(
        "id", model=f"m-{secret}", unsupported_parameters=(UnsupportedParameter(secret, "dropped"),)
    )
    captured = capture(recorder, make_config(tmp_path), record=record)
    captured.path, captured.headers = f"/v2/{secret}", {"user-agent": secret}

    line = encode_recorded_request(build_recorded_request(captured))

    assert secret.encode() not in line
    assert line.count(b"[redacted:email]") == 4


def test_no_bodies_are_written_if_none_is_configured(
    tmp_path: Path, recorder: RequestRecorder
) -> None:
    """Sizes, times and outcome are still written."""
    record = RequestRecord(
        "id", status=200, duration=1.5, outcome="truncated", usage=Usage(1, 2, source="counted")
    )
    captured = capture(
        recorder, make_config(tmp_path, bodies="none"), record=record, body_size=7, response_size=8
    )

    recorded = msgspec.json.decode(encode_recorded_request(build_recorded_request(captured)))

    assert recorded["timing"] == {"duration": 1.5}
    assert recorded["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "source": "counted"}
    assert (recorded["request_size"], recorded["response_size"]) == (7, 8)
    assert {"request", "response", "events", "answer"}.isdisjoint(recorded)


def test_too_large_body_is_left_out(tmp_path: Path, recorder: RequestRecorder) -> None:
    """A body that takes long to encode is left out; its size is recorded."""
    body = b'"' + b"a" * recording_writer.MAX_BODY + b'"'
    captured = capture(
        recorder, make_config(tmp_path, bodies="full"), body=body, body_size=len(body)
    )
    recorded = build_recorded_request(captured)

    assert (recorded.request, recorded.request_text, recorded.request_size) == (None, "", len(body))


def test_answer_is_the_fold_of_the_events() -> None:
    """All events are aggregated by choice; an unfinished choice has no finish reason."""
    response = fold_answer(
        [
            TextDelta("b", 1),
            ReasoningDelta("think", 0),
            TextDelta("a", 0),
            TextDelta("c", 1),
            RefusalDelta("no", 1),
            ToolCallStart(0, 0, "id", "look"),
            ToolCallDelta(0, 0, '{"a"'),
            ToolCallDelta(0, 0, ":1}"),
            ToolCallDelta(0, 1, "of no call"),
            ChoiceEnd("tool_calls", 0),
            Embedding(0, (1.0, 2.0)),
            RelevanceScore(0, 0.5),
            StreamEnd(),
        ]
    )
    first, second = response.choices

    assert (first.text, first.reasoning, first.finish_reason) == ("a", "think", "tool_calls")
    assert [(call.name, call.arguments) for call in first.tool_calls] == [("look", '{"a":1}')]
    assert (second.text, second.refusal, second.finish_reason) == ("bc", "no", None)
    assert (response.embeddings, response.scores) == ([[1.0, 2.0]], [0.5])


# --- files ----------------------------------------------------------------------------------------


def test_files_are_private(tmp_path: Path, clock: Clock) -> None:
    """Only the owner can read files and folders, compressed files included."""
    path = tmp_path / "recordings"
    folder = make_folder(path, clock, size=8)
    folder.write_lines(LINE)  # more than the limit of a file
    folder.configure(make_config(path))
    folder.write_lines(LINE)
    folder.close()

    assert path.stat().st_mode & 0o777 == 0o700
    assert [one.name.partition(".")[2] for one in path.iterdir()] == ["jsonl"]

    folder = make_folder(path, clock, size=400)
    folder.write_lines(LINE * 3)
    assert {one.stat().st_mode & 0o777 for one in path.iterdir()} == {0o600}
    assert any(name.endswith(".jsonl.gz") for name in list_names(path))

    folder.close()


def test_full_and_old_files_are_compressed(tmp_path: Path, clock: Clock) -> None:
    """Nothing is lost, and each file has a unique name even within one second."""
    folder = make_folder(tmp_path, clock, size=8 * 64)
    for _ in range(8):
        folder.write_lines(LINE * 2)
    clock.time += 3600
    folder.clean_up()

    names = list_names(tmp_path)

    assert [name.partition(".")[2] for name in names] == ["jsonl.gz"] * 4
    assert len([*read_recordings(tmp_path)]) == 16
    assert gzip.decompress((tmp_path / names[0]).read_bytes()) == LINE * 4

    folder.close()


def test_oldest_files_are_removed_beyond_the_limit(tmp_path: Path, clock: Clock) -> None:
    """Other files in the folder are not touched."""
    (tmp_path / "notes.jsonl").write_bytes(b"x" * 10_000)
    folder = make_folder(tmp_path, clock, size=1000)
    for number in range(60):
        clock.time += 1
        folder.write_lines(os.urandom(100).hex().encode() + b"%d\n" % number)
    folder.close()
    names = [name for name in list_names(tmp_path) if name != "notes.jsonl"]
    total = sum((tmp_path / name).stat().st_size for name in names)

    assert 500 < total <= 1000 + 250  # the open file counts only once it is full
    assert "notes.jsonl" in list_names(tmp_path)

    newest = b"".join(
        gzip.decompress((tmp_path / name).read_bytes()) for name in names if name.endswith(".gz")
    )
    assert newest.rstrip().endswith((b"59", b"58"))


def test_files_are_removed_after_their_time(tmp_path: Path, clock: Clock) -> None:
    """The time of the last line counts, also for files of processes that have exited."""
    folder = make_folder(tmp_path, clock, retention=3600)
    folder.write_lines(LINE)
    folder.close()
    left = tmp_path / "interlingua-20200101T000000Z-1.jsonl"
    left.write_bytes(LINE)
    os.utime(left, (1, 1))
    part = tmp_path / "interlingua-20200101T000000Z-2.jsonl.gz.part"
    part.write_bytes(b"")
    os.utime(part, (1, 1))
    folder.clean_up()

    assert [name.partition(".")[2] for name in list_names(tmp_path)] == ["jsonl"]

    clock.time += 3601
    folder.clean_up()
    assert list_names(tmp_path) == []


def test_files_of_other_processes_are_left_alone(tmp_path: Path, clock: Clock) -> None:
    """A file that a process writes to is locked; an unlocked one is compressed."""
    paths = [tmp_path / f"interlingua-20200101T000000Z-{number}.jsonl" for number in (1, 2)]
    for path in paths:
        path.write_bytes(LINE)
    folder = make_folder(tmp_path, clock)
    clock.time += 120
    with paths[0].open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        folder.clean_up()
        assert list_names(tmp_path) == [paths[0].name, f"{paths[1].name}.gz"]

        folder = make_folder(tmp_path, clock, size=1, retention=1)
        folder.clean_up()
        assert list_names(tmp_path) == [paths[0].name]


def test_removed_file_is_replaced(tmp_path: Path, clock: Clock) -> None:
    """When an operator deletes the folder, the next line goes to a new one."""
    path = tmp_path / "recordings"
    folder = make_folder(path, clock)
    folder.write_lines(LINE)
    for one in path.iterdir():
        one.unlink()
    path.rmdir()

    folder.write_lines(LINE)

    assert len([*read_recordings(path)]) == 1

    folder.close()


def test_failed_write_leaves_whole_lines(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial line from before the disk was full is removed."""
    folder = make_folder(tmp_path, clock)
    folder.write_lines(LINE)
    write = os.write
    with monkeypatch.context() as patch:

        def write_some(descriptor: int, data: bytes) -> int:
            if len(data) < len(LINE):
                raise OSError(28, "No space left on device")
            return write(descriptor, data[:5])

        patch.setattr(os, "write", write_some)
        with pytest.raises(OSError, match="No space"):
            folder.write_lines(LINE)
    folder.write_lines(LINE)
    folder.close()

    reader = read_recordings(tmp_path)

    assert (len([*reader]), reader.skipped_lines) == (2, 0)


# --- the recorder ---------------------------------------------------------------------------------


def test_requests_are_written_until_the_recorder_closes(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each goes to its policy's folder; closing writes the queue."""
    recorder = RequestRecorder(clock)
    for name in ("a", "b", "a"):
        recorder.record_request(capture(recorder, make_config(tmp_path / name)))

    recorder.close(5)

    assert len([*read_recordings(tmp_path / "a")]) == 2
    assert len([*read_recordings(tmp_path / "b")]) == 1
    assert (recorder.count_written(), recorder.count_dropped()) == (3, 0)
    assert not caplog.records


def test_recorder_without_policies_starts_no_thread(clock: Clock) -> None:
    """It can be closed, too."""
    recorder = RequestRecorder(clock)
    recorder.start()

    recorder.close(1)

    assert recorder.count_written() == 0


def test_failing_folder_drops_records_and_logs_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """With a file in place of the folder, each request is counted and one message is logged."""
    recorder = RequestRecorder(clock)
    (tmp_path / "file").write_bytes(b"")
    config = make_config(tmp_path / "file")
    for _ in range(3):
        recorder.record_request(capture(recorder, config))

    recorder.close(5)

    assert (recorder.count_written(), recorder.count_dropped()) == (0, 3)
    assert [record.getMessage() for record in caplog.records] == [
        f"requests are not recorded in {tmp_path}/file for now: File exists",
        "recording: 3 requests were dropped",
    ]


def test_file_that_takes_short_lines_only_logs_one_line_a_minute(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a disk or quota, writes succeed and fail in turns."""
    recorder, sizes = RequestRecorder(clock), itertools.cycle([10, 100_000])
    config, write = make_config(tmp_path, bodies="full"), os.write
    monkeypatch.setattr(recorder, "start", lambda: None)

    def fill_disk(descriptor: int, data: bytes) -> int:
        if len(data) > 50_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    def write_requests(number: int) -> list[str]:
        caplog.clear()
        for size in itertools.islice(sizes, number):
            recorder._write_batch([capture(recorder, config, body=b'"%b"' % (b"a" * size))])
        return [record.getMessage() for record in caplog.records]

    monkeypatch.setattr(os, "write", fill_disk)
    line = f"requests are not recorded in {tmp_path} for now: No space left on device"
    assert write_requests(50) == [line]
    clock.time += 30
    assert write_requests(50) == []
    clock.time += 30
    assert write_requests(50) == [f"{line} (49 more since the last such warning)"]
    monkeypatch.setattr(os, "write", write)
    assert write_requests(2) == []
    clock.time += 60
    assert write_requests(2) == [f"requests are recorded in {tmp_path} again"]


def test_queue_is_bounded_in_bytes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk costs records, not memory."""
    monkeypatch.setattr(recording_writer, "_MAX_WAITING_BYTES", 10_000)
    recorder = RequestRecorder(clock)
    config = make_config(tmp_path, bodies="full")
    monkeypatch.setattr(recorder, "start", lambda: None)
    for _ in range(5):
        recorder.record_request(capture(recorder, config, body=b'"' + b"a" * 2000 + b'"'))

    assert recorder.count_dropped() == 3

    monkeypatch.undo()
    recorder.start()
    recorder.close(5)

    assert recorder.count_written() == 2


def test_request_that_cannot_be_recorded_costs_only_itself(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged, and the other records are written."""
    recorder = RequestRecorder(clock)
    broken = capture(recorder, make_config(tmp_path), events=[TextDelta("a")])
    broken.events = [TextDelta(5)]  # type: ignore[arg-type]  # as no decoder makes it
    recorder.record_request(broken)
    recorder.record_request(capture(recorder, make_config(tmp_path)))

    recorder.close(5)

    assert (recorder.count_written(), recorder.count_dropped()) == (1, 1)
    assert "can't be recorded" in caplog.text


def test_full_disk_leaves_one_file_and_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write = make_folder(tmp_path, lambda: 0.0), os.write

    def fill_disk(descriptor: int, data: bytes) -> int:
        if len(data) < len(LINE):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:4])

    monkeypatch.setattr(os, "write", fill_disk)
    for _ in range(5):
        with pytest.raises(OSError, match="No space left"):
            folder.write_lines(LINE)
    monkeypatch.setattr(os, "write", write)
    folder.write_lines(LINE)

    [file] = tmp_path.iterdir()
    assert file.read_bytes() == LINE
    folder.close()

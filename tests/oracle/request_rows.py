"""Requests that the gateway and Triton must answer equally, and the intended differences."""

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

VLLM = "/v2/models/vllm_like"
TRT = "/v2/models/trt_like"

DIFFERENCES: Final[Mapping[str, str]] = {
    "abilities": "the gateway does not claim what it does not have: logging, tracing, memory",
    "batch": "one request to a worker has one set of sampling parameters, so a batch does, too",
    "complaints": "what is wrong with a parameter's value, each model says in its own words",
    "configuration": "the gateway shows that part of a configuration which clients read",
    "cut strings": "the original calls this one complaint about a body text/plain",
    "decoupled": "the original refuses infer where a model could answer more than once; we fold",
    "digits": "what is beyond a double when written out is taken as it stands, or as zero",
    "end": "the end of an answer becomes known after its last piece, and is an event of its own",
    "first mismatch": "of inputs with another batch the original names the first in a hash table",
    "header length": "2.51 takes what is no number for 0; newer releases refuse it as we do",
    "inputs": "the gateway's profile also has the inputs of newer releases of the vLLM backend",
    "missing": "the original counts inputs and lets the model find out which of them is missing",
    "models' paths": "a model's name may hold a slash, so it is read percent-decoded",
    "not packed": "the original takes a body that it can't decompress for an empty one",
    "one response": "the original says 200, and then in the body that this can't be answered",
    "packed": "the gateway reads a body before it looks for the model",
    "range": "the original cuts a number to its type's size; the client means what it says",
    "platform": "the real thing is an ensemble, and the model here stands for all of it",
    "rows": "the choices of a stream come one after the other, as the worker sends them",
    "statistics": "counters are the workers' own, and a gateway has none of theirs to show",
    "utf-8": "a text of the gateway's is Unicode; bytes that are not can't be handed on",
}


class Row(Struct, frozen=True):
    """A request. ``differs`` names an intended difference; without it both responses are equal."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = {}
    differs: str = ""

    @property
    def name(self) -> str:
        """Return the test's id."""
        text = self.body.decode("ascii", "backslashreplace").replace("\0", "\\0")
        shown = text if len(text) <= 90 else f"{text[:80]}... ({len(text)})"
        headers = " ".join(f"{name}:{value}" for name, value in self.headers.items())
        return " ".join(part for part in (self.method, self.path, headers, shown) if part)


def iterate_path_rows() -> Iterator[Row]:
    """Yield paths and methods."""
    for path, differs in GETS.items():
        yield Row("GET", path, differs=differs)
    for path in WRONG:
        yield Row("POST", path)
    for path in (f"{VLLM}/generate", f"{VLLM}/generate_stream", f"{TRT}/infer"):
        yield Row("GET", path)
        yield Row("PUT", path, b"{}")
    yield Row("HEAD", "/v2/health/live")
    yield Row("GET", "/v2/repository/index")
    for body in (b"", b"{}", b'{"ready":true}', b'{"ready":1}', b'{"ready":null}', b"[]", b"{"):
        yield Row("POST", "/v2/repository/index", body)
    yield Row("POST", "/v2/repository/any/index")
    for name in ("models/nope/load", "models/nope/unload", "any/models/nope/load"):
        yield Row("POST", f"/v2/repository/{name}")
    for version in ("0", "00", "01", "2", "-1", "abc", "9223372036854775808", "9" * 20):
        yield Row("POST", f"{VLLM}/versions/{version}/generate", SAY)
    for path in ("nope", "nope/versions/9", ""):
        yield Row("POST", f"/v2/models/{path}/generate", b"{")
    yield Row("POST", f"{VLLM}/generate/", SAY)
    yield Row("POST", f"{VLLM}/generate?x=1", SAY)
    for encoding in ("gzip", "identity", "", "br", "deflate", "GZIP"):
        yield Row("POST", f"{VLLM}/generate", SAY, {"Content-Encoding": encoding})
    packed = {"Content-Encoding": "gzip"}
    yield Row("POST", f"{VLLM}/generate_stream", SAY, packed)
    yield Row("POST", "/v2/models/nope/generate", SAY, packed, "packed")


SAY = b'{"text_input":"a"}'
GETS: Final[Mapping[str, str]] = {
    "/v2": "abilities",
    "/v2/": "",
    "/nope": "",
    "/v2/models": "",
    "/v2/models/": "",
    "/v2/logging": "abilities",
    "/v2/health/live": "",
    "/v2/health/ready": "",
    "/v2/health/live/": "",
    VLLM: "inputs",
    f"{VLLM}/versions/1": "inputs",
    f"{VLLM}/versions/9": "",
    f"{VLLM}/config": "configuration",
    f"{VLLM}/versions/9/config": "",
    f"{VLLM}/ready": "",
    f"{VLLM}/versions/1/ready": "",
    f"{VLLM}/versions/9/ready": "",
    f"{VLLM}/versions/{'9' * 20}": "",
    f"{VLLM}/versions/{'9' * 20}/ready": "",
    f"{VLLM}/stats": "statistics",
    f"{VLLM}/versions/9/stats": "",
    TRT: "platform",
    "/v2/models/nope": "",
    "/v2/models/nope/config": "",
    "/v2/models/nope/ready": "",
    "/v2/models/nope/stats": "",
    "/v2/models/stats": "statistics",
    "/v2/models/%76llm_like": "models' paths",
    "/v2/systemsharedmemory": "",
    "/v2/systemsharedmemory/status": "",
    "/v2/systemsharedmemory/region/x/status": "abilities",
    "/v2/cudasharedmemory/status": "",
}
WRONG: Final = (
    "/v2", "/v2/health/live", "/v2/health/ready", VLLM, f"{VLLM}/stats", f"{VLLM}/ready",
    f"{VLLM}/config", "/v2/models/stats", "/v2/systemsharedmemory/status",
)  # fmt: skip

KNOWN_DIFFERENCES: Final[Mapping[bytes, str]] = {
    # --- id
    rb'{"text_input":"hi","id":"42","parameters":{"max_tokens":2,"temperature":0}}': "",
    rb'{"text_input":"hi","id":""}': "",
    rb'{"text_input":"hi","id":42}': "",
    rb'{"text_input":"hi","id":null}': "",
    rb'{"text_input":"hi","id":"a","id":"b"}': "",
    rb'{"text_input":"hi","parameters":{"id":"q"}}': "",
    '{"text_input":"hi","id":"a\\"b\\\\c\\nd\\u00e9é\\u0000zz\\u007f/"}'.encode(): "",
    # --- order of errors
    rb'{"parameters":{"max_tokens":null},"text_input":5}': "",
    rb'{"text_input":5,"parameters":1}': "",
    rb'{"id":5,"text_input":5,"parameters":1}': "",
    rb'{"text_input":5,"id":5}': "",
    # --- prompt
    rb"{}": "",
    rb'{"id":"z"}': "",
    rb'{"id":"z","stream":true}': "missing",
    rb'{"text_input":null}': "",
    rb'{"text_input":["a"]}': "",
    rb'{"text_input":["a","b"]}': "",
    rb'{"text_input":[]}': "",
    rb'{"text_input":[["a"]]}': "",
    rb'{"text_input":[5]}': "",
    rb'{"text_input":{}}': "",
    rb'{"text_input":{"a":1}}': "",
    rb'{"text_input":true}': "",
    rb'{"text_input":""}': "",
    rb'{"text_input":"a","text_input":"b"}': "",
    rb'{"id":"q","text_input":"a","text_input":"b"}': "",
    rb'{"text_input":"\u001b\u001f\b\f\/\u2028 <>&"}': "",
    # --- parameters
    rb'{"text_input":"a","parameters":null}': "",
    rb'{"text_input":"a","parameters":"{}"}': "",
    rb'{"text_input":"a","parameters":[]}': "",
    rb'{"text_input":"a","parameters":{}}': "",
    rb'{"text_input":"a","parameters":{"x":null}}': "",
    rb'{"text_input":"a","parameters":{"x":[1]}}': "",
    rb'{"text_input":"a","parameters":{"parameters":{}}}': "",
    rb'{"text_input":"a","parameters":{"parameters":1}}': "",
    rb'{"text_input":"a","parameters":{},"parameters":{"max_tokens":1}}': "",
    rb'{"parameters":{"text_input":"a"}}': "",
    rb'{"text_input":"a","parameters":{"text_input":"b"}}': "",
    rb'{"parameters":{"text_input":"b"},"text_input":"a"}': "",
    rb'{"text_input":"a","parameters":{"stream":1}}': "",
    rb'{"text_input":"a","stop":["x"]}': "",
    rb'{"text_input":"a","x":{}}': "",
    rb'{"text_input":"a","":1}': "",
    rb'{"text_input":"a","":true}': "",
    rb'{"text_input":"a","foo":NaN,"bar":-Inf,"baz":Infinity}': "",
    rb'{"text_input":"a","foo":1,"foo":2}': "",
    rb'{"text_input":"a","big":18446744073709551616,"neg":-9223372036854775809}': "",
    rb'{"text_input":"a","max_tokens":1}': "",
    rb'{"text_input":"a","max_tokens":0}': "",
    rb'{"text_input":"a","max_tokens":"1"}': "",
    rb'{"text_input":"a","max_tokens":"x"}': "complaints",
    rb'{"text_input":"a","max_tokens":1,"max_tokens":2}': "",
    # --- further inputs of the model
    rb'{"text_input":"a","sampling_parameters":{}}': "",
    rb'{"text_input":"a","sampling_parameters":"{\"max_tokens\":1}","max_tokens":2}': "",
    rb'{"text_input":"a","sampling_parameters":"{"}': "complaints",
    rb'{"text_input":"a","stream":"true"}': "",
    rb'{"text_input":"a","stream":1}': "",
    rb'{"text_input":"a","stream":null}': "",
    rb'{"text_input":"a","stream":[]}': "",
    rb'{"text_input":"a","stream":[true,false]}': "",
    rb'{"text_input":"a","stream":[true],"max_tokens":1}': "",
    rb'{"text_input":"a","exclude_input_in_output":true}': "",
    rb'{"text_input":"a","return_finish_reason":true,"return_num_output_tokens":true}': "",
    rb'{"text_input":"a","max_tokens":8,"return_finish_reason":true}': "",
    rb'{"text_input":"a","n":2}': "",
    # --- invalid JSON
    b"": "",
    b"{": "",
    b"hello": "",
    b"[]": "",
    b'"x"': "",
    b"null": "",
    b'{"text_input":"a"} x': "",
    b'{"text_input":"a"}{': "",
    b'{"text_input":"a",}': "",
    b'{"text_input":"a"}\0': "",
    b' {"text_input":"a"} \n': "",
    b'\xef\xbb\xbf{"text_input":"a"}': "",
    b"\xef\xbb\xbf{": "",
    b"\xef\xbb\xbf": "",
    b"\0": "",
    b'{"a"\0': "",
    b'{"a":\0}': "",
    b"{'a':1}": "",
    b"//c\n{}": "",
    b'{"x":-Infinit}': "",
    b'{"x":NaNN}': "",
    b'{"x":NIaN}': "",
    b'{"x":NaInf}': "",
    b'{"x":1.e5}': "",
    b'{"x":1e+}': "",
    b'{"x":-1e999}': "",
    b'{"x":1e309}': "",
    b'{"x":0.1e309}': "",
    b'{"x":0e309}': "digits",
    b'{"x":%b}' % (b"9" * 309): "digits",
    rb'{"text_input":"\ud800"}': "",
    rb'{"text_input":"\ude00"}': "utf-8",
    rb'{"text_input":"\ud83d\ude00"}': "",
    rb'{"text_input":"\x"}': "",
    b'{"text_input":"a\x1f"}': "",
    b'{"text_input":"a\xff"}': "utf-8",
    b'{"text_input":"a\xff","x":nul}': "utf-8",
}

STREAMED: Final[Mapping[bytes, str]] = {
    rb'{"text_input":"a","stream":true}': "",
    rb'{"text_input":"a","stream":true,"id":"s1"}': "",
    rb'{"text_input":"a","stream":true,"max_tokens":0}': "",
    rb'{"text_input":"a","stream":true,"max_tokens":8}': "",
    rb'{"text_input":"a","stream":true,"parameters":{"max_tokens":1}}': "",
    rb'{"text_input":"a","stream":false,"max_tokens":2}': "",
    rb'{"text_input":"a","stream":true,"return_num_output_tokens":true}': "",
    rb'{"text_input":"a","stream":true,"return_finish_reason":true}': "end",
    rb'{"text_input":"a","stream":true,"n":2}': "rows",
    rb'{"text_input":"a","stream":true,"max_tokens":"x"}': "complaints",
}


def iterate_body_rows() -> Iterator[Row]:
    """Yield bodies of generate and generate_stream."""
    for body, differs in KNOWN_DIFFERENCES.items():
        yield Row("POST", f"{VLLM}/generate", body, differs=differs)
        yield Row("POST", f"{VLLM}/generate_stream", body, differs=differs)
    for body, differs in STREAMED.items():
        yield Row("POST", f"{VLLM}/generate_stream", body, differs=differs)
    for body in (b'{"text_input":"a","stream":true}', b'{"text_input":"a","stream":true,"id":"i"}'):
        yield Row("POST", f"{VLLM}/generate", body, differs="one response")
    for model in ("vllm_fails_first", "vllm_fails_third"):
        yield Row("POST", f"/v2/models/{model}/generate", SAY)
        yield Row("POST", f"/v2/models/{model}/generate_stream", SAY)
        yield Row("POST", f"/v2/models/{model}/generate_stream", b'{"text_input":"","stream":true}')


BATCHED: Final[Mapping[bytes, str]] = {
    b'{"text_input":"a"}': "",
    b'{"max_tokens":1}': "",
    b'{"text_input":"a","max_tokens":5}': "",
    b'{"text_input":"a","max_tokens":5.5}': "",
    b'{"text_input":"a","max_tokens":5.0}': "",
    b'{"text_input":"a","max_tokens":"5"}': "",
    b'{"text_input":"a","max_tokens":true}': "",
    b'{"text_input":"a","max_tokens":null}': "",
    b'{"text_input":"a","max_tokens":[]}': "",
    b'{"text_input":"a","max_tokens":{"a":1}}': "",
    b'{"text_input":"a","max_tokens":[1,"x"]}': "",
    b'{"text_input":"a","max_tokens":[1,2]}': "",
    b'{"text_input":"a","max_tokens":1099511627776}': "range",
    b'{"text_input":"a","max_tokens":9223372036854775808}': "",
    b'{"text_input":"a","max_tokens":1,"seed":-1}': "",
    b'{"text_input":"a","max_tokens":1,"seed":1.5}': "",
    b'{"text_input":"a","max_tokens":1,"seed":18446744073709551615}': "",
    b'{"text_input":"a","max_tokens":1,"seed":18446744073709551616}': "",
    b'{"text_input":"a","max_tokens":1,"temperature":1}': "",
    b'{"text_input":"a","max_tokens":1,"temperature":"1"}': "",
    b'{"text_input":"a","max_tokens":1,"temperature":true}': "",
    b'{"text_input":"a","max_tokens":1,"temperature":null}': "",
    b'{"text_input":"a","max_tokens":1,"temperature":[]}': "",
    b'{"text_input":"a","max_tokens":1,"temperature":NaN}': "range",
    b'{"text_input":"a","max_tokens":1,"stop_words":"x"}': "",
    b'{"text_input":"a","max_tokens":1,"stop_words":["x","y"]}': "",
    b'{"text_input":"a","max_tokens":1,"stop_words":[["x","y"],["z"]]}': "",
    b'{"text_input":"a","max_tokens":1,"stop_words":[]}': "",
    b'{"text_input":"a","max_tokens":1,"stop_words":""}': "",
    b'{"text_input":"a","max_tokens":1,"stop_words":null}': "",
    b'{"text_input":"a b","max_tokens":2,"return_log_probs":true}': "",
    b'{"text_input":"a b","max_tokens":1,"return_log_probs":true}': "",
    b'{"text_input":"a b","max_tokens":2,"return_num_input_tokens":true}': "",
    b'{"text_input":"a b","max_tokens":2,"return_num_output_tokens":true,"id":"i"}': "",
    b'{"text_input":["a","b"],"max_tokens":[2,2]}': "",
    b'{"text_input":["a","b"],"max_tokens":[1,2]}': "batch",
    b'{"text_input":["a","b"],"max_tokens":1}': "",
    b'{"id":"i","text_input":["a","b"],"max_tokens":1}': "",
    b'{"text_input":["a","b"],"max_tokens":[1,2],"stop_words":["x","y"]}': "first mismatch",
    b'{"text_input":["a","b","c","d"],"max_tokens":[2,2,2,2]}': "",
    b'{"text_input":["a","b","c","d","e"],"max_tokens":[1,2,3,4,5]}': "",
    b'{"text_input":[],"max_tokens":1}': "",
    b'{"text_input":[],"max_tokens":[]}': "",
}


def iterate_batch_rows() -> Iterator[Row]:
    """Yield bodies of generate for the model with batches."""
    for body, differs in BATCHED.items():
        yield Row("POST", f"{TRT}/generate", body, differs=differs)

"""What a request's head leads to is worked out once, for as long as paths and keys are the same."""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from gateway import auth
from gateway.app import surroundings
from gateway.auth import Keyring, Principal
from gateway.config import load
from gateway.core.errors import Unauthorized
from gateway.core.ports import Headers
from gateway.paths import Paths
from gateway.seam import Head
from gateway.server import Server
from gateway.snapshot import Snapshot
from gateway.telemetry import Record

KEY = "sk-known"
BODY = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "x"}]})
CHAT = "/v1/chat/completions"
TRITON = [{"name": "triton", "profile": "plain"}]


class Asking(Struct):
    """A ``gateway.seam.Request``."""

    head: Head | None
    path: str = CHAT
    key: str = KEY
    id: str = "mine"
    method: str = "POST"
    query: str = ""
    peer: str = ""
    headers: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        self.headers = {"authorization": f"Bearer {self.key}", "x-request-id": self.id}

    async def body(self, limit: int) -> bytes:
        return BODY[:limit]


class Answer:
    """A ``gateway.seam.Sink`` for a whole answer."""

    pressure = started = False
    status = 0

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        del headers, body
        self.started = True
        self.status = status

    def start(self, status: int, headers: Headers) -> None:
        raise AssertionError(status, headers)

    def write(self, data: bytes) -> None:
        raise AssertionError(data)

    def finish(self) -> None:
        raise AssertionError

    async def drain(self) -> None:
        raise AssertionError


class Tokens:
    """Every text is somebody's token, until none is."""

    good = True

    def holder(self, token: str, digest: str) -> Principal | None:
        del digest
        if not self.good:
            raise Unauthorized("the token has expired", missing=False)
        return Principal(f"jwt:{token}", "")

    async def settle(self) -> None:
        raise AssertionError


class Gateway:
    """A server, and what it recorded."""

    def __init__(
        self, *keys: str, dialects: Sequence[object] = ("openai", *TRITON), **models: object
    ) -> None:
        self.records = list[Record]()
        told = {
            "listeners": [{"address": "127.0.0.1:0", "dialects": dialects}],
            "backends": {"echo": {"kind": "echo"}},
            "models": {"m": {"backend": "echo"}, **models},
            "keys": [
                {"name": f"key{number}", "sha256": hashlib.sha256(key.encode()).hexdigest()}
                for number, key in enumerate(keys)
            ],
        }
        config = load(msgspec.json.encode(told).decode(), "g.yaml", env={})
        now = Snapshot(config, replace(surroundings(), observe=self.records.append))
        [self.server] = now.servers.values()

    async def asked(self, one: Asking, server: Server | None = None) -> tuple[int, str, str, str]:
        """The status, and what was recorded: the dialect, the key, and the exchange's name."""
        sink = Answer()
        await (server or self.server).serve(one, sink)
        record = self.records[-1]
        assert record.path == one.path
        return sink.status, record.dialect, record.key, record.id


@pytest.mark.parametrize(
    ("path", "dialect"), [(CHAT, "openai"), ("/v2/models/m/versions/1/infer", "triton")]
)
async def test_a_head_is_looked_at_once(
    path: str, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, one = Gateway(KEY), Asking(Head(), path)
    first = await gateway.asked(one)
    assert first[1:] == (dialect, "key0", "mine")

    def never(*args: object) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(auth, "presented", never)
    monkeypatch.setattr(Paths, "find", never)
    assert await gateway.asked(one) == first


async def test_one_that_gives_no_name_has_another_each_time() -> None:
    gateway, one = Gateway(KEY), Asking(Head(), id="")
    names = {(await gateway.asked(one))[3] for _ in range(3)}
    assert len(names) == 3
    assert "" not in names


async def test_nothing_is_kept_of_a_head_that_may_not_come_again() -> None:
    assert (await Gateway(KEY).asked(Asking(None)))[0] == 200


async def test_other_keys_are_asked_anew() -> None:
    head, former = Head(), Gateway(KEY)
    assert (await former.asked(Asking(head)))[0] == 200

    without = Gateway("sk-other")
    for _ in range(2):
        assert await without.asked(Asking(head)) == (401, "openai", "", "mine")
    renamed = Gateway("sk-other", KEY)
    assert await renamed.asked(Asking(head)) == (200, "openai", "key1", "mine")
    nobody = Gateway()
    assert await nobody.asked(Asking(head)) == (200, "openai", "", "mine")
    assert await renamed.asked(Asking(head)) == (200, "openai", "key1", "mine")


async def test_other_paths_are_asked_anew() -> None:
    head = Head()
    assert (await Gateway(KEY).asked(Asking(head)))[0] == 200
    assert (await Gateway(KEY, dialects=TRITON).asked(Asking(head)))[0] == 404


async def test_who_poses_as_another_does_so_for_a_known_head_too() -> None:
    gateway, head = Gateway(KEY, "sk-other"), Head()
    assert (await gateway.asked(Asking(head)))[2] == "key0"
    posing = gateway.server.tried("key1", gateway.server._explain, gateway.records.append)
    assert (await gateway.asked(Asking(head), posing))[2] == "key1"
    assert (await gateway.asked(Asking(head)))[2] == "key0"


async def test_a_wrong_key_is_looked_at_each_time() -> None:
    gateway, head = Gateway(KEY), Head()
    for _ in range(2):
        assert (await gateway.asked(Asking(head, key="sk-wrong")))[0] == 401
    assert head.known is None


async def test_a_token_is_looked_at_each_time() -> None:
    gateway, head, tokens = Gateway(KEY), Head(), Tokens()
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    gateway.server._keyring = Keyring([Principal("key0", digest)], tokens)
    for _ in range(2):
        assert (await gateway.asked(Asking(head, key="t")))[:3] == (200, "openai", "jwt:t")
    tokens.good = False
    assert (await gateway.asked(Asking(head, key="t")))[0] == 401
    assert (await gateway.asked(Asking(Head())))[2] == "key0"


async def test_whose_path_several_dialects_have_is_chosen_each_time() -> None:
    npu = {"backend": "echo", "dialect": "mindie"}
    gateway, head = Gateway(KEY, dialects=(*TRITON, "mindie"), npu=npu), Head()
    await gateway.asked(Asking(head, "/v2/models/m/generate"))
    assert gateway.records[-1].key == "key0"
    assert head.known is None


async def test_what_anybody_may_ask_is_known_without_a_key() -> None:
    gateway, head = Gateway(KEY, dialects=TRITON), Head()
    one = Asking(head, "/v2/health/live", key="sk-wrong", method="GET")
    for _ in range(2):
        assert (await gateway.asked(one))[:3] == (200, "triton", "")
    assert head.known is not None

"""Images, audio, videos and files reach the worker, are reported, or are rejected."""

from typing import TYPE_CHECKING, cast

import pytest

from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from protocols.core.errors import ClientError, UnsupportedFeature
from protocols.core.loss import (
    CONTENT_LABELS,
    UnsupportedParameter,
    find_unseen_content,
    list_lost_content,
    refuse_lost_content,
)
from protocols.core.request import (
    AudioPart,
    ContentPart,
    FilePart,
    GenerationRequest,
    ImagePart,
    Message,
    TextPart,
    VideoPart,
)

if TYPE_CHECKING:
    from protocols.core.interfaces import UpstreamAdapter

REGISTRY = ProtocolRegistry(PROTOCOLS)
DATA = "UklGRiQAAABXQVZF"
PARTS: dict[str, ContentPart] = {
    "images": ImagePart(f"data:image/png;base64,{DATA}"),
    "audio": AudioPart(DATA, "wav"),
    "videos": VideoPart(f"data:video/mp4;base64,{DATA}"),
    "files": FilePart(file_data=f"data:application/pdf;base64,{DATA}", filename="a.pdf"),
}
WORKERS = [
    (name, profile)
    for name in PROTOCOLS
    if REGISTRY.serves_workers(name)
    for profile in REGISTRY.get_profiles(name)
]


def build_request(label: str) -> GenerationRequest:
    parts = (TextPart("what is this?"), PARTS[label])
    return GenerationRequest(
        model="m",
        kind="chat",
        messages=(Message("user", (TextPart("hi"),)), Message("user", parts)),
    )


def test_every_content_type_has_a_sample() -> None:
    assert {*CONTENT_LABELS.values()} == PARTS.keys()


@pytest.mark.parametrize("label", PARTS)
@pytest.mark.parametrize(("name", "profile"), WORKERS)
def test_worker_gets_the_content_or_the_loss_names_it(name: str, profile: str, label: str) -> None:
    adapter = cast("UpstreamAdapter", REGISTRY.create_adapter(name, profile, {}))
    request = build_request(label)
    try:
        losses = adapter.unsupported_parameters(request, {})
        body = adapter.encode_request(request).body
    except ClientError:
        return  # rejected

    assert DATA.encode() in body or label in list_lost_content(losses)


@pytest.mark.parametrize("label", PARTS)
def test_refusal_names_the_first_part_that_is_lost(label: str) -> None:
    losses = find_unseen_content(build_request(label).messages, CONTENT_LABELS)

    with pytest.raises(UnsupportedFeature, match=f"does not support {label}") as excinfo:
        refuse_lost_content(losses)

    assert excinfo.value.param == "messages[1].content[1].type"


def test_other_losses_are_not_refused() -> None:
    other = UnsupportedParameter("messages[0].name", "dropped", "names", "messages")

    refuse_lost_content((other,))

"""What a source is made from."""

from msgspec import Struct

from backends.pool.discovery.file import File, Read
from backends.pool.discovery.names import Dns, DnsSettings, Template
from backends.pool.discovery.source import Source


class SourceSettings(Struct, frozen=True):
    """Either a ``file`` that lists workers, or what ``dns`` tells, made workers by ``template``."""

    file: str | None = None
    dns: DnsSettings | None = None
    template: Template = Template()

    def __post_init__(self) -> None:
        if (self.file is None) is (self.dns is None):
            raise ValueError("a source is either a file or dns")


def make_source(settings: SourceSettings, read: Read) -> Source:
    """The source; ``read`` reads a file's bytes. Raises ValueError for what makes no sense."""
    if settings.dns is not None:
        return Dns(settings.dns, settings.template)
    return File(settings.file or "", read)

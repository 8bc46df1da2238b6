"""The context of all checks: locations of values, registered protocols, and the issues found.

Values that could not be read are UNSET; validation skips them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import UNSET

from gateway.config.decoder import SourceLocation
from gateway.config.errors import ConfigPath, IssueCollector, quote, suggest_name
from gateway.config.registry import ProtocolRegistry


def is_set(value: object) -> bool:
    """Whether the value could be read."""
    return value is not UNSET


class ValidationContext:
    """Collects issues by path."""

    def __init__(
        self,
        issues: IssueCollector,
        locations: Mapping[ConfigPath, SourceLocation],
        protocols: ProtocolRegistry,
        files: Mapping[ConfigPath, str] = MappingProxyType({}),
    ) -> None:
        self._issues = issues
        self._locations = locations
        self._files = files
        self.protocols = protocols

    def add_issue(self, path: ConfigPath, message: str, *, key: bool = False) -> None:
        """Report an issue of the value at a path, or of its key; the nearest known path counts."""
        location = self._locations.get(path)
        prefix = path
        while location is None:
            prefix = prefix[:-1]
            location = self._locations.get(prefix)
        self._issues.add((key and location.key_position) or location.value_position, message, path)

    def get_raw_text(self, path: ConfigPath) -> str:
        """The scalar at a path as written, since expanded variables may contain secrets."""
        return self._locations[path].raw_text

    def is_present(self, path: ConfigPath) -> bool:
        """Whether the file has a value at this path."""
        return path in self._locations

    def file(self, path: ConfigPath) -> str | None:
        """The file that the value at a path names, or None."""
        return self._files.get(path)

    def check_protocol(
        self, name: str, profile: str | None, path: ConfigPath, profile_path: ConfigPath = ()
    ) -> bool:
        """Whether the protocol named at ``path`` and its profile are known; reports it if not."""
        names = self.protocols.names
        if name not in names:
            self.add_issue(
                path,
                f"{quote(self.get_raw_text(path))} is not a protocol; {suggest_name(name, names)}",
            )
            return False
        try:
            profiles = self.protocols.get_profiles(name)
        except ImportError as error:
            self.add_issue(path, f"the protocol {name} can't be used here: {error}")
            return False
        if profile is not None and is_set(profile) and profile not in profiles:
            name_text = quote(self.get_raw_text(profile_path))
            message = f"{name_text} is not a profile of {name}; {suggest_name(profile, profiles)}"
            self.add_issue(profile_path, message)
            return False
        return is_set(profile)

    def check_client_protocol(
        self, name: str, profile: str | None, path: ConfigPath, profile_path: ConfigPath = ()
    ) -> bool:
        """Like ``check_protocol``, for a protocol of a listener."""
        if not self.check_protocol(name, profile, path, profile_path):
            return False
        if not self.protocols.serves_clients(name):
            self.add_issue(path, f"{name} is for workers only, and not for clients")
            return False
        return True

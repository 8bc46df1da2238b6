"""The context of all checks: locations of values, registered protocols, and the issues found.

Values that could not be read are UNSET; validation skips them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import UNSET

from gateway.config.decoder import SourceLocation
from gateway.config.errors import MAX_ISSUES, ConfigPath, IssueCollector, quote, suggest_name
from gateway.config.key_file import KeyFile
from gateway.config.registry import ProtocolRegistry


def is_set(value: object) -> bool:
    """Whether the value could be read."""
    return value is not UNSET


class ValidationContext:
    """Collects issues by path.

    ``key_file`` has the last keys of the configuration.
    """

    def __init__(
        self,
        issues: IssueCollector,
        locations: Mapping[ConfigPath, SourceLocation],
        protocols: ProtocolRegistry,
        files: Mapping[ConfigPath, str] = MappingProxyType({}),
        key_file: KeyFile | None = None,
    ) -> None:
        self._issues = issues
        self._locations = locations
        self._files = files
        self.protocols = protocols
        self._key_file = key_file

    @property
    def is_full(self) -> bool:
        """Whether there are so many issues that no more are needed."""
        return len(self._issues.issues) >= MAX_ISSUES

    def add_issue(self, path: ConfigPath, message: str, *, key: bool = False) -> None:
        """Report an issue of the value at a path, or of its key; the nearest known path counts."""
        key_file, index = self._find_key_file(path)
        if key_file is None:
            prefix = path
            while (location := self._locations.get(prefix)) is None:
                prefix = prefix[:-1]
        else:
            path = path[2:]
            location = key_file.locate(index, path)
        position = (key and location.key_position) or location.value_position
        file = UNSET if key_file is None else key_file.filename
        self._issues.add(position, message, path, file)

    def get_raw_text(self, path: ConfigPath) -> str:
        """The scalar at a path as written, since expanded variables may contain secrets."""
        key_file, index = self._find_key_file(path)
        if key_file is not None:
            return key_file.locate(index, path[2:]).raw_text
        return self._locations[path].raw_text

    def describe_key(self, number: int) -> str:
        """The place of an API key: its path, or its line in the file of keys."""
        key_file, index = self._find_key_file(("keys", number))
        if key_file is None:
            return f"keys[{number}]"
        return f"line {key_file.get_line_number(index)} of {key_file.filename}"

    def is_present(self, path: ConfigPath) -> bool:
        """Whether the file has a value at this path."""
        return path in self._locations

    def file(self, path: ConfigPath) -> str | None:
        """The file that the value at a path names, or None."""
        return self._files.get(path)

    def _find_key_file(self, path: ConfigPath) -> tuple[KeyFile | None, int]:
        """The file of the key that has this path, and the key's index there."""
        key_file = self._key_file
        if key_file is None or path[:1] != ("keys",) or len(path) == 1:
            return None, 0
        index = int(path[1]) - key_file.first_number
        return (None, 0) if index < 0 else (key_file, index)

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

    def check_worker_protocol(
        self, name: str, profile: str | None, path: ConfigPath, profile_path: ConfigPath = ()
    ) -> bool:
        """Like ``check_protocol``, for a protocol of a pool."""
        if not self.check_protocol(name, profile, path, profile_path):
            return False
        if not self.protocols.serves_workers(name):
            self.add_issue(path, f"{name} is for clients only, and not for workers")
            return False
        return True

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

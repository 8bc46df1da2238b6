"""What every check of a configuration's sense stands on: where things are, and what is registered.

A check sees a configuration in which whatever could not be read is UNSET, and stays silent on that.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import UNSET

from gateway.config.complaints import Complaints, Steps, instead, quoted
from gateway.config.dialects import Dialects
from gateway.config.reader import Place


def known(value: object) -> bool:
    """Whether it could be read."""
    return value is not UNSET


class Ground:
    """Takes complaints by path."""

    def __init__(
        self,
        complaints: Complaints,
        places: Mapping[Steps, Place],
        dialects: Dialects,
        files: Mapping[Steps, str] = MappingProxyType({}),
    ) -> None:
        self._issues = complaints
        self._locations = places
        self._files = files
        self.protocols = dialects

    def add_issue(self, path: Steps, message: str, *, key: bool = False) -> None:
        """Complain of the value at a path, or of its key. What is not there is said further up."""
        place = self._locations.get(path)
        steps = path
        while place is None:
            steps = steps[:-1]
            place = self._locations.get(steps)
        self._issues.add((key and place.key_position) or place.value_position, message, path)

    def get_raw_text(self, path: Steps) -> str:
        """The scalar at a path as it is written: what the environment put in may be a secret."""
        return self._locations[path].raw_text

    def is_present(self, path: Steps) -> bool:
        """Whether something stands at a path."""
        return path in self._locations

    def file(self, path: Steps) -> str | None:
        """The file that is named at a path, as seen from here; None where there is none."""
        return self._files.get(path)

    def check_protocol(
        self, name: str, profile: str | None, path: Steps, profile_path: Steps = ()
    ) -> bool:
        """Complain of an unknown dialect, named at ``path``, or profile. False if there is none."""
        names = self.protocols.names
        if name not in names:
            self.add_issue(
                path, f"{quoted(self.get_raw_text(path))} is no dialect; {instead(name, names)}"
            )
            return False
        try:
            profiles = self.protocols.get_profiles(name)
        except ImportError as error:
            self.add_issue(path, f"the dialect {name} can't be used here: {error}")
            return False
        if profile is not None and known(profile) and profile not in profiles:
            shown = quoted(self.get_raw_text(profile_path))
            message = f"{shown} is no profile of {name}; {instead(profile, profiles)}"
            self.add_issue(profile_path, message)
            return False
        return known(profile)

    def check_client_protocol(
        self, name: str, profile: str | None, path: Steps, profile_path: Steps = ()
    ) -> bool:
        """``check_dialect`` for one that clients speak."""
        if not self.check_protocol(name, profile, path, profile_path):
            return False
        if not self.protocols.serves_clients(name):
            self.add_issue(path, f"no client is answered in {name}; it is for workers alone")
            return False
        return True

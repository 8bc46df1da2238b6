"""A ``config.yaml`` of the LiteLLM proxy to a configuration of this gateway.

What it may hold: docs.litellm.ai/docs/proxy/config_settings.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from gateway.config.complaints import Complaints, ConfigError
from gateway.config.document import compose, decode
from gateway.tools.migrate import reading
from gateway.tools.migrate.groups import Group, Made, add
from gateway.tools.migrate.members import Members
from gateway.tools.migrate.settings import Settings
from gateway.tools.migrate.source import Given, LeftOut, Note, Notes, Part
from gateway.tools.migrate.writing import document

_PREFACE: Final = (
    "Made of a config.yaml of LiteLLM's by `interlingua migrate litellm`, which told what it left",
    "out and what it changed. Secrets are read from the environment.",
)
_WHYS: Final = {
    "environment_variables": "set them where the gateway is started",
    "include": "migrate the files that it names, too",
    "guardrails": "nothing here reads prompts or answers",
    "mcp_servers": "tools are the client's own",
    "files_settings": "files are not served",
    "finetune_settings": "models are not trained",
    "vector_store_registry": "nothing is put into prompts",
}


class Migrated(Struct, frozen=True):
    """The new file, or None where there is nothing to serve; and what became of the old one."""

    text: str | None
    notes: tuple[Note, ...]

    @property
    def whole(self) -> bool:
        """Whether nothing was left out."""
        return self.text is not None and all(note.kind != "left out" for note in self.notes)


def migrate(data: bytes, filename: str) -> Migrated:
    """The same gateway, as far as it can be. Raises ConfigError where the file can't be read."""
    complaints, notes = Complaints(filename), Notes()
    root = Given(compose(decode(data, filename), complaints), (), complaints).part()
    router, module, server = (_part(root, name, complaints) for name in _SETTINGS)
    settings = Settings(router, module, server, notes)
    strategy = settings.strategy()
    made, habits = Made(), settings.habits(strategy)
    members = Members(notes, by_rates=strategy == "simple-shuffle")
    for group in _groups(root, members, complaints):
        add(group, habits, made, notes)
    settings.aliases(made)
    settings.fallbacks(made)
    told = {"version": 1, **settings.listening()}
    if defaults := settings.defaults():
        told["defaults"] = defaults
    settings.rest()
    root.leave(notes, "there is no such setting here", _WHYS, {})
    if complaints.found:
        raise ConfigError(filename, complaints.found)
    told |= {"backends": made.backends, "models": made.models}
    order = [key for key in _ORDER if key in told]
    text = document({key: told[key] for key in order}, _PREFACE) if made.models else None
    return Migrated(text, tuple(sorted(notes.found)))


_SETTINGS: Final = ("router_settings", "litellm_settings", "general_settings")
_ORDER: Final = (
    "version",
    "listeners",
    "admin",
    "limits",
    "keys",
    "defaults",
    "backends",
    "models",
)


def _part(of: Part, name: str, complaints: Complaints) -> Part:
    """A mapping below this one; an empty one where there is none."""
    given = of.take(name)
    return Part(of.given, {}, complaints) if given is None else given.part()


def _groups(root: Part, members: Members, complaints: Complaints) -> list[Group]:
    """The entries of the list, by their names."""
    credentials = _credentials(root, members.notes)
    groups: dict[str, Group] = {}
    listed = root.take("model_list")
    for given in listed.items() if listed is not None else ():
        entry = given.part()
        called = entry.take("model_name")
        if called is None:
            members.notes.add(given, "left out", "it has no model_name; the whole entry")
        elif (name := reading.name(called, members.notes)) is not None:
            params = _part(entry, "litellm_params", complaints)
            try:
                _complete(params, credentials)
                found = members.read(name, entry, params)
            except LeftOut as left:
                members.notes.add(left.given, "left out", str(left))
                continue
            entry.leave(members.notes, "there is no such setting here", {}, {})
            groups.setdefault(name, Group(name, [])).members.append(found)
    return [*groups.values()]


def _complete(params: Part, credentials: Mapping[str, Part]) -> None:
    """Put in what is said elsewhere. Raises LeftOut."""
    named = params.take("litellm_credential_name")
    if named is not None:
        if (shared := credentials.get(named.text)) is None:
            raise LeftOut(named, "there are no such credentials")
        params.under(shared)


def _credentials(root: Part, notes: Notes) -> Mapping[str, Part]:
    """What entries may say by a name."""
    found = {}
    listed = root.take("credential_list")
    for given in listed.items() if listed is not None else ():
        one = given.part()
        name, values = one.take("credential_name"), one.take("credential_values")
        one.leave(notes, "nobody asks for it", {}, {"credential_info": "nobody asks for it"})
        if name is not None and values is not None:
            found[name.text] = values.part()
    return found

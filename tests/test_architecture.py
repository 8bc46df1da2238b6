"""Rules of the architecture that no other tool checks. A failure names the place and the remedy.

They cover sizes, the layers in pyproject.toml, the registries of protocols and backends, class
names, forbidden names, and the pinned dependencies.
"""

import ast
import importlib
import itertools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("gateway", "backends", "protocols")
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

FILE_LINES: Final = 1_050
FUNCTION_LINES: Final = 60
PARAMETERS: Final = 7
POSITIONAL: Final = 6

FORBIDDEN: Final = frozenset(
    line
    for line in (ROOT / "tests" / "forbidden_names.txt").read_text("utf-8").split("\n")
    if line and not line.startswith("#")
)

EXCUSED: Final[dict[tuple[str, str], str]] = {
    ("backends/torch/commands.py", "echo"): "a field of the request",
    ("gateway/cli/built_in.py", "echo"): "a built-in configuration",
    ("gateway/cli/built_in.py", "torch"): "the package, which may not be installed",
    ("gateway/cli/replay.py", "openai"): "the default of an option",
    ("gateway/tools/compare/embeddings.py", "openai"): "the tool's own gateway",
    ("gateway/tools/compare/embeddings.py", "torch"): "the tool's own gateway",
    ("gateway/config/schema.py", "echo"): "a Struct's tag",
    ("protocols/chat/openapi.py", "openai"): "the Python package of an example",
    ("protocols/chat/upstream.py", "openai"): "a worker profile's name",
    ("protocols/openai/hosted_apis.py", "ollama"): "a worker profile's name",
    ("gateway/tools/connect_check.py", "torch"): "the package, which may not be installed",
}

FOREIGN_NAMES: Final[dict[str, str]] = {
    "gateway/tools/migrate/providers.py": "names in another gateway's configuration",
}
"""Modules in which the names of protocols and backends are not this gateway's."""

PROTOCOLS: Final = ("protocols", "PROTOCOLS")
BACKENDS: Final = ("backends", "BACKENDS")
REGISTRIES: Final = (PROTOCOLS, BACKENDS)
SHARED: Final = frozenset({"core", "chat"})
"""Packages under protocols that are no protocol."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def list_sources(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def list_all_sources() -> list[Path]:
    tops = (top for top in ROOT.iterdir() if top.is_dir() and not top.name.startswith("."))
    return list_sources(*(top.name for top in tops if top.name not in {"tests", "build", "dist"}))


def get_relative_path(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parse_module(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def fail_on_violations(violations: Sequence[str], remedy: str) -> None:
    if violations:
        pytest.fail("\n  ".join([remedy, *violations]), pytrace=False)


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────


def iterate_functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, Function | ast.ClassDef):
            inner = f"{prefix}{child.name}."
        if isinstance(child, Function):
            yield prefix + child.name, child
        yield from iterate_functions(child, inner)


def count_parameters(function: Function, *, method: bool) -> int:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if method and positional and positional[0].arg in {"self", "cls"}:
        positional = positional[1:]
    rest = [one for one in (arguments.vararg, arguments.kwarg) if one]
    return len(positional) + len(arguments.kwonlyargs) + len(rest)


def measure_sizes() -> Iterator[tuple[str, int, int]]:
    """Yield what was measured, its size, and the largest size allowed."""
    for path in list_all_sources():
        where = get_relative_path(path)
        yield f"{where}: lines", len(path.read_text("utf-8").splitlines()), FILE_LINES
        for name, function in iterate_functions(parse_module(path)):
            at = f"{where}:{function.lineno}: {name}"
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            yield f"{at}: lines", lines, FUNCTION_LINES
            yield f"{at}: parameters", count_parameters(function, method="." in name), PARAMETERS


def test_files_and_functions_stay_small() -> None:
    violations = [
        f"{what}: {size}; at most {largest}"
        for what, size, largest in measure_sizes()
        if size > largest
    ]
    fail_on_violations(violations, "Split it by subject:")


def iterate_calls(path: Path) -> Iterator[ast.Call]:
    """Yield the calls in functions; a module's tables have their columns' order beside them."""
    calls = {
        node
        for _, function in iterate_functions(parse_module(path))
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
    }
    yield from sorted(calls, key=lambda call: call.lineno)


def test_calls_name_their_values_if_there_are_many() -> None:
    """A Redis script takes its keys and arguments only by position."""
    violations = [
        f"{get_relative_path(path)}:{call.lineno}: {ast.unparse(call.func)}"
        for path in list_all_sources()
        for call in iterate_calls(path)
        if sum(not isinstance(one, ast.Starred) for one in call.args) > POSITIONAL
        and ast.unparse(call.func) != "pipe.eval"
    ]
    fail_on_violations(violations, f"Pass values by keyword, or at most {POSITIONAL} by position:")


# ── layers ───────────────────────────────────────────────────────────────────────────────────────


def read_contracts() -> list[dict[str, Any]]:
    contracts: list[dict[str, Any]] = PROJECT["tool"]["importlinter"]["contracts"]
    return contracts


def get_layer_names(contract: dict[str, Any]) -> set[str]:
    return {name.strip("() ") for layer in contract["layers"] for name in re.split(r"[|:]", layer)}


def test_every_package_of_the_gateway_is_in_a_layer() -> None:
    layers = set[str]()
    for contract in read_contracts():
        if contract["type"] == "layers" and "containers" not in contract:
            layers |= get_layer_names(contract)
    present = {
        f"gateway.{path.stem}"
        for path in (ROOT / "gateway").iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file()
    }
    remedy = "Add it to the layers in pyproject.toml ([[tool.importlinter.contracts]], the first):"
    fail_on_violations(sorted(present - layers), remedy)
    fail_on_violations(
        sorted(
            name
            for name in layers - present
            if not (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()
            and not (ROOT / name.replace(".", "/") / "__init__.py").is_file()
        ),
        "pyproject.toml names a layer that does not exist:",
    )


def test_every_protocol_and_backend_is_in_the_contracts() -> None:
    """A protocol's folder may import the shared modules and no other protocol; so may a backend."""
    named = set[str]()
    for contract in read_contracts():
        named |= set(contract.get("modules", ())) | set(contract.get("forbidden_modules", ()))
    homes = {
        f"{package}.{get_top_module(value)}"
        for package, name in REGISTRIES
        for value in load_registry(package, name).values()
    }
    unnamed = {home for home in homes if not any(fnmatch(home, pattern) for pattern in named)}
    remedy = "Name it beside the others in pyproject.toml's import contracts:"
    fail_on_violations(sorted(unnamed), remedy)


def test_gateway_package_imports_nothing() -> None:
    violations = [
        f"gateway/__init__.py:{node.lineno}"
        for node in ast.walk(parse_module(ROOT / "gateway" / "__init__.py"))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    fail_on_violations(
        violations, "Remove the import: importing one module of gateway must not load others:"
    )


# ── registries ───────────────────────────────────────────────────────────────────────────────────


def load_registry(package: str, name: str) -> dict[str, Any]:
    registry: dict[str, Any] = getattr(importlib.import_module(package), name)
    return registry


def get_module_name(value: object) -> str:
    """Return the module of an entry: "module:name", a class, a function or an instance."""
    if isinstance(value, str):
        return value.partition(":")[0]
    return str(getattr(value, "__module__", type(value).__module__))


def get_top_module(value: object) -> str:
    """Return the module or package directly under protocols or backends that holds an entry."""
    return get_module_name(value).split(".")[1]


@pytest.mark.parametrize(("package", "name"), REGISTRIES)
def test_every_registry_entry_can_be_imported(package: str, name: str) -> None:
    violations = []
    for key, value in load_registry(package, name).items():
        if not isinstance(value, str):
            continue
        module, _, attribute = value.partition(":")
        try:
            target = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in PACKAGES:
                violations.append(f'"{key}": "{value}": there is no module {error.name}')
            continue  # an optional package is not installed
        except AttributeError:
            violations.append(f'"{key}": "{value}": {module} has no {attribute!r}')
            continue
        if not callable(target) and getattr(target, "name", None) is None:
            violations.append(f'"{key}": "{value}" is neither a class, a function nor an adapter')
    fail_on_violations(violations, f"Correct the entry in {package}/__init__.py ({name}):")


def get_methods(node: ast.ClassDef) -> set[str]:
    return {part.name for part in node.body if isinstance(part, Function)}


def iterate_classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(parse_module(path)) if isinstance(node, ast.ClassDef))


def get_interface_methods(path: str, name: str) -> set[str]:
    return next(get_methods(node) for node in iterate_classes(ROOT / path) if node.name == name)


@pytest.mark.parametrize(
    ("package", "name", "path", "interfaces"),
    [
        (*PROTOCOLS, "protocols/core/interfaces.py", ("ClientAdapter", "UpstreamAdapter")),
        (*BACKENDS, "backends/interfaces.py", ("Backend",)),
    ],
)
def test_every_protocol_and_backend_is_registered(
    package: str, name: str, path: str, interfaces: tuple[str, ...]
) -> None:
    homes = {get_top_module(value) for value in load_registry(package, name).values()}
    wanted = [get_interface_methods(path, one) for one in interfaces]
    violations = []
    for source in list_sources(package):
        owner = source.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if owner in homes or get_relative_path(source) == path:
            continue
        violations += [
            f"{get_relative_path(source)}:{node.lineno}: {node.name}"
            for node in iterate_classes(source)
            if any(get_methods(node) >= one for one in wanted) and owner not in SHARED
        ]
    fail_on_violations(violations, f"Give it an entry in {name} ({package}/__init__.py):")


# ── names of protocols and backends ───────────────────────────────────────────────────────────────


@cache
def list_string_literals(path: Path) -> Sequence[tuple[int, str]]:
    """Return every string that a module uses, without documentation strings."""
    module = parse_module(path)
    prose = {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        (node.lineno, node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]


def find_mentions(
    package: str, name: str, tops: tuple[str, ...]
) -> Iterator[tuple[str, str, int, str]]:
    """Yield strings that contain a protocol's name, or that are a backend's kind."""
    entire = package == "backends"
    for key, value in load_registry(package, name).items():
        own = ROOT / package / get_top_module(value)
        allowed = {own.with_suffix(".py"), ROOT / package / "__init__.py"}
        word = re.compile(rf"\A{key}\Z" if entire else rf"(?<!\w){key}(?!\w)", re.IGNORECASE)
        for path in list_sources(*tops):
            if path in allowed or own in path.parents:
                continue
            for line, text in list_string_literals(path):
                if word.search(text):
                    yield get_relative_path(path), key, line, text


def list_all_mentions() -> list[tuple[str, str, int, str]]:
    """Return all mentions; in protocols ``echo`` is a parameter, not a backend's kind."""
    protocols = find_mentions(*PROTOCOLS, PACKAGES)
    return [*protocols, *find_mentions(*BACKENDS, ("gateway", "backends"))]


def test_no_module_names_a_protocol_or_a_backend() -> None:
    violations = [
        f"{where}:{line}: {text[:60]!r} names {key!r}"
        for where, key, line, text in list_all_mentions()
        if (where, key) not in EXCUSED and where not in FOREIGN_NAMES
    ]
    remedy = (
        "Adding a protocol must cost one folder and one entry. Let the object say it (a method, "
        "an attribute, a profile), or move the text to its module; if the word means something "
        "else here, say so in EXCUSED above:"
    )
    fail_on_violations(violations, remedy)


def test_no_script_of_the_web_ui_names_a_protocol() -> None:
    words = re.compile(rf"\b({'|'.join(load_registry(*PROTOCOLS))})\b", re.IGNORECASE)
    violations = [
        f"{get_relative_path(path)}:{number}: {line.strip()[:60]}"
        for path in list_scripts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    fail_on_violations(violations, "Let the adapter say it in its OpenAPI description:")


def test_every_exception_is_needed() -> None:
    used = {(where, key) for where, key, _, _ in list_all_mentions()}
    stale = [f"{where}: {key}" for where, key in sorted(EXCUSED.keys() - used)]
    stale += sorted(FOREIGN_NAMES.keys() - {where for where, _ in used})
    fail_on_violations(stale, "These excuses are no longer needed; delete them:")


def test_json_is_decoded_where_its_depth_is_counted() -> None:
    """Only one module calls the decoder of msgspec, which has no limit of depth of its own."""
    violations = [
        f"{get_relative_path(path)}:{number}: {line.strip()}"
        for path in list_sources(*PACKAGES)
        if path != ROOT / "protocols/core/json_text.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\bjson\.(Decoder|decode|loads?)\b", line)
    ]
    fail_on_violations(violations, "Use JsonDecoder or decode_json of protocols.core.json_text:")


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def is_in_protocol_folder(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return parts[0] == "protocols" and len(parts) > 2 and parts[1] not in SHARED


def iterate_type_aliases(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names that a module gives to types, such as ``Headers = tuple[str, ...]``."""
    for node in parse_module(path).body:
        names = [one.id for one in get_assignment_targets(node) if isinstance(one, ast.Name)]
        if not isinstance(getattr(node, "value", None), ast.Call):  # such as a TypeVar
            yield from ((node.lineno, name) for name in names if re.match("[A-Z][A-Z]?[a-z]", name))


def test_names_of_types_are_unique() -> None:
    """The agreed names of adapters may repeat, one in each protocol's folder."""
    places = defaultdict[str, list[str]](list)
    for path in list_sources(*PACKAGES):
        if is_in_protocol_folder(path):
            continue
        classes = ((node.lineno, node.name) for node in iterate_classes(path))
        for line, name in (*classes, *iterate_type_aliases(path)):
            if not name.startswith("_"):
                places[name].append(f"{get_relative_path(path)}:{line}")
    violations = [f"{name}: {', '.join(where)}" for name, where in places.items() if where[1:]]
    fail_on_violations(violations, "Two types have one name; rename one of them:")


def get_assignment_targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def iterate_defined_names(path: Path, *, variables: bool) -> Iterator[tuple[int, str]]:
    """Yield a module's name and those of its classes, functions, methods and attributes.

    Attributes are what a class body assigns or annotates, and what is assigned to ``self``. With
    ``variables``, all parameters and variables are included.
    """
    yield 1, path.parent.name if path.stem == "__init__" else path.stem
    parse = parse_module.__wrapped__ if variables else parse_module  # tests are parsed once
    for node in ast.walk(parse(path)):
        if isinstance(node, Function | ast.ClassDef):
            yield node.lineno, node.name
        if isinstance(node, ast.ClassDef):
            for field in (one for part in node.body for one in get_assignment_targets(part)):
                if isinstance(field, ast.Name):
                    yield field.lineno, field.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif variables:
            yield from iterate_variable_names(node)


def iterate_variable_names(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the parameter or variable that a node binds."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
    elif isinstance(node, ast.arg):
        yield node.lineno, node.arg
    elif isinstance(node, ast.alias) and node.asname:
        yield node.lineno, node.asname
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.lineno, node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.lineno, node.rest


_DECLARATIONS: Final = {
    ".js": (
        r"(?:\b(?:const|let|var)\s+[\[{]?|\bfunction\b[^(]*\(?|\bclass\s|[(,{]\s*)"
        r"(\w+)(?=\s*[,=:;(){}\]])"
    ),
    ".toml": r"^\s*[\"\[]*([\w.-]+)[\"\]]*\s*(?:=|\]|:)",
    "Makefile": r"^([\w-]+)\s*[:?]?[=:]",
}
"""Patterns of the names that other files declare: variables, functions, parameters and keys."""


def iterate_declared_names(path: Path) -> Iterator[tuple[int, str]]:
    pattern = re.compile(_DECLARATIONS[path.suffix.replace("mjs", "js") or path.name])
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        for declared in pattern.finditer(line):
            yield number, declared[1]


def list_scripts() -> list[Path]:
    """Return the scripts of the web UI."""
    return sorted((ROOT / "gateway" / "admin" / "static").glob("*.js"))


def list_declaring_files() -> list[Path]:
    clients = (ROOT / "tests" / "clients" / "node").glob("*.mjs")
    return sorted([*list_scripts(), *clients, ROOT / "pyproject.toml", ROOT / "Makefile"])


def iterate_names_to_check() -> Iterator[tuple[Path, int, str]]:
    """Yield all names; variables and parameters only in tests and in the page generator."""
    for path in list_sources(*PACKAGES, "tests", "docs/generate"):
        variables = get_relative_path(path).startswith(("tests/", "docs/"))
        names = iterate_defined_names(path, variables=variables)
        yield from ((path, line, name) for line, name in names)
    for path in list_declaring_files():
        yield from ((path, line, name) for line, name in iterate_declared_names(path))


PLAIN_IN_COMPOUNDS: Final = frozenset(
    {
        "beside", "counted", "found", "instead", "kept", "known", "leaves", "listening", "made",
        "measured", "offers", "powers", "reached", "takes",
    }
)  # fmt: skip
"""Forbidden words that are plain English in a longer name, such as ``not_found``."""


def split_words(name: str) -> list[str]:
    """Return the words of a name in snake or camel case, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+", name)]


def has_forbidden_word(name: str) -> bool:
    words = split_words(name)
    if len(words) < 2:
        return name.strip("_").lower() in FORBIDDEN
    pairs = {"_".join(pair) for pair in itertools.pairwise(words)}
    return bool(({*words, *pairs} & FORBIDDEN) - PLAIN_IN_COMPOUNDS)


def test_no_forbidden_name_is_used() -> None:
    violations = [
        f"{get_relative_path(path)}:{line}: {name}"
        for path, line, name in iterate_names_to_check()
        if has_forbidden_word(name)
    ]
    fail_on_violations(
        violations, "Use the field's standard term (tests/forbidden_names.txt lists the others):"
    )


@pytest.mark.parametrize(
    ("name", "is_forbidden"),
    [
        ("told", True),
        ("_TOLD", True),
        ("told_as_it_was", True),
        ("FRONT_DOOR", True),
        ("GivenUp", True),
        ("client_gives_back", False),
        ("give_back_all", True),
        ("not_found", False),
        ("model", False),
    ],
)
def test_forbidden_words_are_found_in_compound_names(name: str, *, is_forbidden: bool) -> None:
    assert has_forbidden_word(name) == is_forbidden


FORMER_TERM: Final = "dia" + "lect"
"""The former word for a protocol."""

FORMER_KEYS: Final = frozenset(
    {"tests/bench/interlingua.py", "tests/bench/test_gateway_revisions.py"}
)
"""The benchmarks can start earlier revisions of the gateway, whose configuration has the key."""


def test_no_text_uses_the_former_term_for_a_protocol() -> None:
    folders = [ROOT / one for one in (*PACKAGES, "tests", "docs/generate")]
    files = [path for one in folders for path in one.rglob("*") if path.is_file()]
    kinds = {".py", ".js", ".mjs", ".html", ".toml", ".txt", ".yaml", ".json", ""}
    violations = [
        f"{get_relative_path(path)}: {FORMER_TERM}"
        for path in [*files, ROOT / "pyproject.toml", ROOT / "Makefile"]
        if path.suffix in kinds and get_relative_path(path) not in FORMER_KEYS
        if FORMER_TERM in f"{path.name} {path.read_text('utf-8', errors='replace')}".lower()
    ]
    fail_on_violations(violations, "Say protocol:")


def test_forbidden_names_are_single_words() -> None:
    assert len(FORBIDDEN) > 70
    fail_on_violations(
        sorted(one for one in FORBIDDEN if not one.isidentifier()), "One name a line:"
    )


# ── packaging ────────────────────────────────────────────────────────────────────────────────────


def normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_constraints_contain_only_exact_pins() -> None:
    plain = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; .+)?")
    fail_on_violations(
        [line for line in read_pins() if not plain.fullmatch(line)],
        "Write name==version and nothing else, without a local part such as +cpu:",
    )


def test_every_dependency_is_pinned() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {normalize_name(re.split(r"[^A-Za-z0-9._-]", one, maxsplit=1)[0]) for one in wanted}
    pinned = {normalize_name(line.partition("==")[0]) for line in read_pins()}
    fail_on_violations(
        sorted(names - pinned), "Pin it in constraints.txt, with what it brings along:"
    )


def test_readme_changelog_and_license_exist() -> None:
    pages = ("README.md", "CHANGELOG.md", "LICENSE")
    fail_on_violations([page for page in pages if not (ROOT / page).is_file()], "Write it:")
    version = PROJECT["project"]["version"]
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    has_heading = f"## [{version}]" in text or "## [Unreleased]" in text

    assert has_heading, f"CHANGELOG.md: add a heading '## [Unreleased]' or '## [{version}]'"


def test_version_is_the_same_in_all_files() -> None:
    version = PROJECT["project"]["version"]
    text = (ROOT / "gateway" / "__init__.py").read_text("utf-8")

    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)

    assert match is None or match[1] == version, (
        f"gateway/__init__.py says {match[1]}, pyproject.toml {version}: make them the same"
    )

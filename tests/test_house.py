"""The rules of the house that no other tool checks. Each message names the place and the mend."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("gateway", "backends", "protocols")
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

FILE_LINES: Final = 1_000
FUNCTION_LINES: Final = 60
PARAMETERS: Final = 7

RAISED: Final[dict[str, tuple[int, str]]] = {
    # "gateway/x.py": (450, "docs/adr/0000-why.md")               a file's lines
    # "gateway/x.py:name lines": (60, "docs/adr/0000-why.md")     a function's lines
    # "gateway/x.py:name parameters": (9, "docs/adr/0000-why.md")
}

EXCUSED: Final[dict[tuple[str, str], str]] = {
    ("backends/torch/ipc.py", "echo"): "the request's field",
    ("gateway/cli/serve.py", "echo"): "a built-in configuration",
    ("gateway/cli/serve.py", "torch"): "the package, which may not be installed",
    ("gateway/config/__init__.py", "echo"): "the name of a Struct",
    ("gateway/config/__init__.py", "pool"): "the name of a Struct",
    ("gateway/config/__init__.py", "torch"): "the name of a Struct",
    ("gateway/tools/connect_check.py", "torch"): "the package, which may not be installed",
    ("gateway/tools/migrate/providers.py", "databricks"): "what another gateway's names stand for",
    ("gateway/tools/migrate/providers.py", "echo"): "what another gateway's mocks become",
    ("gateway/tools/migrate/providers.py", "openai"): "what another gateway's names stand for",
    ("gateway/tools/migrate/providers.py", "tgi"): "what another gateway's names stand for",
    ("gateway/tools/migrate/providers.py", "triton"): "what another gateway's names stand for",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def every_source() -> list[Path]:
    tops = (top for top in ROOT.iterdir() if top.is_dir() and not top.name.startswith("."))
    return sources(*(top.name for top in tops if top.name not in {"tests", "build", "dist"}))


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def report(faults: list[str], mend: str) -> None:
    if faults:
        pytest.fail("\n  ".join([mend, *faults]), pytrace=False)


# ── budgets ──────────────────────────────────────────────────────────────────────────────────────


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, Function | ast.ClassDef):
            inner = f"{prefix}{child.name}."
        if isinstance(child, Function):
            yield prefix + child.name, child
        yield from functions(child, inner)


def arity(function: Function, *, method: bool) -> int:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if method and positional and positional[0].arg in {"self", "cls"}:
        positional = positional[1:]
    rest = [one for one in (arguments.vararg, arguments.kwarg) if one]
    return len(positional) + len(arguments.kwonlyargs) + len(rest)


def measures() -> Iterator[tuple[str, int, int, str]]:
    """Key in RAISED, what was found, what is allowed, how to say it."""
    for path in every_source():
        where = short(path)
        lines = len(path.read_text("utf-8").splitlines())
        yield where, lines, FILE_LINES, f"{where}: {lines} lines"
        for name, function in functions(tree(path)):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            at = f"{where}:{function.lineno}: {name}"
            yield f"{where}:{name} lines", lines, FUNCTION_LINES, f"{at} has {lines} lines"
            count = arity(function, method="." in name)
            said = f"{at} has {count} parameters"
            yield f"{where}:{name} parameters", count, PARAMETERS, said


def test_files_and_functions_stay_small() -> None:
    faults = []
    for key, found, allowed, said in measures():
        limit = RAISED.get(key, (allowed, ""))[0]
        if found > limit:
            faults.append(f"{said}; {limit} are allowed")
    report(faults, "Split it by what it knows; or raise its budget by an ADR, in RAISED above:")


def test_raised_budgets_are_needed_and_explained() -> None:
    needed = {key for key, found, allowed, _ in measures() if found > allowed}
    report(sorted(RAISED.keys() - needed), "These budgets are no longer needed; delete them:")
    missing = sorted(adr for _, adr in RAISED.values() if not (ROOT / adr).is_file())
    report(missing, "A raised budget needs its ADR; write it:")


# ── arrows ───────────────────────────────────────────────────────────────────────────────────────


def contracts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = PROJECT["tool"]["importlinter"]["contracts"]
    return found


def layer_names(contract: dict[str, Any]) -> set[str]:
    return {name.strip("() ") for layer in contract["layers"] for name in re.split(r"[|:]", layer)}


def test_every_gateway_module_stands_in_a_layer() -> None:
    layers = set[str]()
    for contract in contracts():
        if contract["type"] == "layers" and "containers" not in contract:
            layers |= layer_names(contract)
    present = {
        f"gateway.{path.stem}"
        for path in (ROOT / "gateway").iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file()
    }
    mend = "Add it to the layers in pyproject.toml ([[tool.importlinter.contracts]], the first):"
    report(sorted(present - layers), mend)


def test_every_dialect_and_backend_stands_in_the_contracts() -> None:
    """A dialect's home may know the shared modules and no other dialect; likewise a backend."""
    named = set[str]()
    for contract in contracts():
        named |= set(contract.get("modules", ())) | set(contract.get("forbidden_modules", ()))
    homes = {f"protocols.{home(value)}" for value in registry("protocols", "PROTOCOLS").values()}
    homes |= {f"backends.{home(value)}" for value in registry("backends", "KINDS").values()}
    mend = "Name it where its neighbours stand in pyproject.toml's import contracts (three places):"
    report(sorted(homes - named), mend)


def test_the_gateway_package_imports_nothing() -> None:
    faults = [
        f"gateway/__init__.py:{node.lineno}"
        for node in ast.walk(tree(ROOT / "gateway" / "__init__.py"))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    report(faults, "Move the import out: protocols.core must not depend on the rest of gateway:")


# ── registries ───────────────────────────────────────────────────────────────────────────────────


def registry(package: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = getattr(importlib.import_module(package), name)
    return found


def module_of(value: object) -> str:
    """The module of a registry's value: "module:name", a class, a function or an instance."""
    if isinstance(value, str):
        return value.partition(":")[0]
    return str(getattr(value, "__module__", type(value).__module__))


def home(value: object) -> str:
    """The module or package directly under protocols or backends in which an entry lives."""
    return module_of(value).split(".")[1]


@pytest.mark.parametrize(("package", "name"), [("protocols", "PROTOCOLS"), ("backends", "KINDS")])
def test_every_registry_line_leads_somewhere(package: str, name: str) -> None:
    faults = []
    for key, value in registry(package, name).items():
        if not isinstance(value, str):
            continue
        module, _, attribute = value.partition(":")
        try:
            target = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in PACKAGES:
                faults.append(f'"{key}": "{value}": there is no module {error.name}')
            continue  # an extra is not installed here
        except AttributeError:
            faults.append(f'"{key}": "{value}": {module} has no {attribute!r}')
            continue
        if not callable(target) and getattr(target, "name", None) is None:
            faults.append(f'"{key}": "{value}" is neither a class, a function nor a dialect')
    report(faults, f"Correct the line in {package}/__init__.py ({name}):")


def methods(node: ast.ClassDef) -> set[str]:
    return {part.name for part in node.body if isinstance(part, Function)}


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))


def port(name: str) -> set[str]:
    ports = ROOT / "gateway" / "core" / "ports.py"
    return next(methods(node) for node in classes(ports) if node.name == name)


@pytest.mark.parametrize(
    ("package", "name", "ports"),
    [("protocols", "PROTOCOLS", ("Dialect", "WorkerDialect")), ("backends", "KINDS", ("Backend",))],
)
def test_every_dialect_and_backend_has_its_line(
    package: str, name: str, ports: tuple[str, ...]
) -> None:
    homes = {home(value) for value in registry(package, name).values()}
    wanted = [port(one) for one in ports]
    faults = []
    for path in sources(package):
        owner = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if owner in homes:
            continue
        faults += [
            f"{short(path)}:{node.lineno}: {node.name}"
            for node in classes(path)
            if any(methods(node) >= one for one in wanted)
        ]
    report(faults, f"Give it a line in {name} ({package}/__init__.py); nobody can name it yet:")


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@cache
def literals(path: Path) -> Sequence[tuple[int, str]]:
    """Every string that a module uses. A string standing alone is documentation."""
    module = tree(path)
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


def mentions(package: str, name: str, tops: tuple[str, ...]) -> Iterator[tuple[str, str, int, str]]:
    """A dialect's name counts as a word of any literal; a backend's kind only as the whole."""
    whole = package == "backends"
    for key, value in registry(package, name).items():
        own = ROOT / package / home(value)
        allowed = {own.with_suffix(".py"), ROOT / package / "__init__.py"}
        word = re.compile(rf"\A{key}\Z" if whole else rf"(?<!\w){key}(?!\w)", re.IGNORECASE)
        for path in sources(*tops):
            if path in allowed or own in path.parents:
                continue
            for line, text in literals(path):
                if word.search(text):
                    yield short(path), key, line, text


def all_mentions() -> list[tuple[str, str, int, str]]:
    """Backends' kinds are not sought where ``echo`` is a parameter: in dialects."""
    dialects = mentions("protocols", "PROTOCOLS", PACKAGES)
    return [*dialects, *mentions("backends", "KINDS", ("gateway", "backends"))]


def test_nobody_names_a_dialect_or_a_backend() -> None:
    faults = [
        f"{where}:{line}: {text[:60]!r} names {key!r}"
        for where, key, line, text in all_mentions()
        if (where, key) not in EXCUSED
    ]
    mend = (
        "Adding one must cost one module and one line. Let the object say it (a method, an "
        "attribute, a profile), or move the text to its module; if the word means something "
        "else here, say so in EXCUSED above:"
    )
    report(faults, mend)


def test_excuses_are_needed() -> None:
    used = {(where, key) for where, key, _, _ in all_mentions()}
    stale = [f"{where}: {key}" for where, key in sorted(EXCUSED.keys() - used)]
    report(stale, "These excuses are no longer needed; delete them:")


# ── packaging ────────────────────────────────────────────────────────────────────────────────────


def folded(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_constraints_are_plain_pins() -> None:
    plain = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; .+)?")
    report(
        [line for line in pins() if not plain.fullmatch(line)],
        "Write name==version and nothing else, without a local part such as +cpu:",
    )


def test_every_dependency_is_pinned() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {folded(re.split(r"[^A-Za-z0-9._-]", one, maxsplit=1)[0]) for one in wanted}
    pinned = {folded(line.partition("==")[0]) for line in pins()}
    report(sorted(names - pinned), "Pin it in constraints.txt, with what it brings along:")


def test_the_front_pages_stand() -> None:
    pages = ("README.md", "CHANGELOG.md", "LICENSE")
    report([page for page in pages if not (ROOT / page).is_file()], "Write it:")
    version = PROJECT["project"]["version"]
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    said = f"## [{version}]" in text or "## [Unreleased]" in text
    assert said, f"CHANGELOG.md: add a heading '## [Unreleased]' or '## [{version}]'"


def test_the_version_is_said_once() -> None:
    version = PROJECT["project"]["version"]
    text = (ROOT / "gateway" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is None or found[1] == version, (
        f"gateway/__init__.py says {found[1]}, pyproject.toml {version}: make them the same"
    )

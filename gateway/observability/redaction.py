"""Redaction of recorded requests: personal data and secrets are replaced before they are written.

Rules apply to every string of a JSON value and to the names of its fields:

fields    the values of fields by name, at any depth, or by path from the top
patterns  regular expressions, the built-in ones and those of the configuration
data      images, audio and other Base64 data become their size and digest

JSON without anything that a rule could find is recognized by its bytes, and not even decoded.

A string with JSON in it, such as the arguments of a tool call, is redacted inside. A string too
long to search is replaced as a whole, so that no search delays a response.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.config.schema import RedactionConfig
from protocols.core.json_text import decode_json

MAX_STRING: Final = 256 << 10
"""The longest string, in characters, that is searched. A search holds the interpreter lock."""
_MAX_DEPTH: Final = 128
_MAX_NESTED_JSON: Final = 3
"""How deep JSON in strings of JSON is followed."""
_MAX_PLACES: Final = 32
"""How many places a record names."""
_BASE64_LENGTH: Final = 256
"""The shortest string that is taken for Base64 data."""
_BASE64: Final = re.compile(r"(?:data:[\w.+/;=-]{0,200},)?[A-Za-z0-9+/_\r\n-]{200,}={0,2}\s{0,8}")
_DIGITS_AS_ZERO: Final = bytes(48 if 48 <= code < 58 else 32 for code in range(256))  # noqa: PLR2004 - 0 to 9
_CARD_DIGITS: Final = b"0" * 13
_CARD_SEPARATORS: Final = b" .-\\nrtf" + bytes(range(128, 256))
"""What may stand between the digits of a card, in JSON: blanks of all kinds, and some more."""
_DATA_URL: Final = re.compile(r"data:[\w.+/-]{1,100}(?:;[\w=-]{1,100}){0,4};base64,[\w+/=-]{64,}")
_MAX_CLEAN: Final = 4096
"""How many short strings are known to have nothing to redact: names of fields and the like."""
_MAX_CLEAN_LENGTH: Final = 64
_MAX_DIGITS: Final = 19
_CARD_NUMBER: Final = re.compile(
    "4[0-9]{12}(?:[0-9]{3}){0,2}|3[47][0-9]{13}|3[0689][0-9]{12,17}|35[0-9]{14}|2[2-7][0-9]{14}"
    "|[56][0-9]{12,18}|9792[0-9]{12}"
)
"""By the digits that issuers begin with: a time in milliseconds or nanoseconds is none."""
_DIGEST: Final = re.compile(
    r"(?i:(?<![\w-])(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{56}|[0-9a-f]{64}|[0-9a-f]{96}"
    r"|[0-9a-f]{128}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?![\w-]))"
)
"""A hash of a usual length, or a UUID: their digits are no number."""
_MAX_DIGEST: Final = 128
_WORD: Final = re.compile("[a-z]{0,15}|[A-Z]{0,15}|[A-Z][a-z]{1,14}|[0-9]{1,4}")
_REFERENCE: Final = re.compile(
    r"(?:(?i:true|false|none|null|nil|undefined)|\$[A-Z_][A-Z0-9_]{0,99}|\$\{\w{1,99}\}"
    r"|os\.(?:getenv|environ(?:\[|\.get)?)|process\.env(?:\[|\.[A-Z_]{1,99})"
    r"|(?:self|this|settings|config|options|args|tokenizer)\.(?:[a-z_]{1,40}\.){0,4}[a-z_]{0,40}"
    r"(?:password|passwd|secret|key|token)"
    r"|\{(?:[a-z_]{1,40}\.){0,4}[a-z_]{0,40}(?:password|passwd|secret|key|token)\})[\]}.:|\\`]*"
)
"""What stands in code where a secret would be: a literal, a variable, an attribute of that name."""
_SECRET_NAME: Final = re.compile(
    "(?i:password|passwd|pwd|secret|accountkey|token|api|access|auth|private|master|sign|encrypt)"
)
"""In a name: any value is a secret. Other names with ``_key`` are those of databases and caches."""

ANSWER_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "text": frozenset(
        {"content", "text", "generated_text", "text_output", "output_text", "completion", "outputs"}
    ),
    "reasoning": frozenset({"reasoning", "reasoning_content", "thinking"}),
    "refusal": frozenset({"refusal"}),
    "arguments": frozenset({"arguments", "input"}),
}
"""The names that protocols have for the fields of a ``RecordedAnswer``."""


class _Pattern(Struct, frozen=True):
    """A regular expression, searched only in strings that have a hint or one of ``prefixes``."""

    name: str
    regex: re.Pattern[str]
    hints: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    """What stands before ``-`` or ``_``: looked for there only."""
    is_match: Callable[[re.Match[str]], bool] | None = None
    """Whether what the expression found is meant."""
    before: re.Pattern[str] | None = None
    """What must stand before it, and is replaced, too. It is only searched for there: an expression
    that begins with it would try every character."""

    def replace_matches(self, text: str) -> str:
        """The text without what the expression finds."""
        if self.before is None:
            return self.regex.sub(self.get_replacement, text)
        pieces, end = list[str](), 0
        for match in self.regex.finditer(text):
            at = match.start()
            begin = self.before.search(text, max(end, at - 256), at)
            if begin is not None:
                pieces += (text[end : begin.start()], f"[redacted:{self.name}]")
                end = match.end()
        return "".join((*pieces, text[end:])) if pieces else text

    def may_match(self, text: str) -> bool:
        """Whether the text has a hint, if there are any."""
        for hint in self.hints:  # a generator would take three times as long
            if hint in text:
                return True
        if not self.prefixes:
            return not self.hints
        pieces = text.replace("_", "-").split("-")
        return any(piece.endswith(self.prefixes) for piece in pieces)

    def get_replacement(self, match: re.Match[str]) -> str:
        """What replaces a match."""
        if self.is_match is not None and not self.is_match(match):
            return match[0]
        return f"[redacted:{self.name}]"


def _is_card(match: re.Match[str]) -> bool:
    """Whether some of these groups of digits are the number of a card, and not part of a hash."""
    begin, end = max(0, match.start() - _MAX_DIGEST), match.end() + _MAX_DIGEST
    text = _DIGEST.sub(lambda digest: "-" * len(digest[0]), match.string[begin:end])
    groups = re.findall("[0-9]+", text[match.start() - begin : match.end() - begin])
    for first in range(len(groups)):
        number = ""
        for group in groups[first:]:
            number += group
            if len(number) > _MAX_DIGITS:
                break
            if _CARD_NUMBER.fullmatch(number) and _has_card_checksum(number):
                return True
    return False


def _is_random(text: str) -> bool:
    """Whether this isn't made of words and short numbers: a key isn't."""
    return not all(map(_WORD.fullmatch, re.split("[^A-Za-z0-9]+", text)))


def _is_key(match: re.Match[str]) -> bool:
    """Whether what follows the prefix of a key is random."""
    prefix = max((one for one in _KEY_PREFIXES if match[0].startswith(one)), key=len)
    return _is_random(match[0].removeprefix(prefix))


def _is_authorization(match: re.Match[str]) -> bool:
    """Whether the word after Bearer or Basic is a credential: both are words of prose."""
    if match["blank"] is None:  # in a header
        return match["header"] is None or not _REFERENCE.fullmatch(match["header"])
    scheme, _, value = match[0].partition(match["blank"])
    if scheme.lower() != "basic":
        is_all = match[0] == match.string
        return is_all or _is_random(value) or value.endswith("=")
    try:
        return b":" in base64.b64decode(value.rstrip("=") + "==")
    except ValueError:
        return value.endswith("=")


def _is_password(match: re.Match[str]) -> bool:
    """Whether the value may be a password or a key: only what clearly refers to one is none."""
    name, value = match["name"], match["value"]
    if not name:  # in a URL
        return True
    if value == name or _REFERENCE.fullmatch(value):
        return False
    return bool(_SECRET_NAME.search(name)) or "=" in value or _is_random(value)


def _has_payload(match: re.Match[str]) -> bool:
    """Whether this is more than the first part of a JWT, which may be any Base64."""
    return "." in match[0]


def _has_card_checksum(number: str) -> bool:
    """The algorithm of Luhn."""
    digits = [int(digit) for digit in number]
    odd, even = digits[-1::-2], digits[-2::-2]
    return (sum(odd) + sum(sum(divmod(2 * digit, 10)) for digit in even)) % 10 == 0


# Keys by their forms, also those of detect-secrets (Yelp, Apache License 2.0) and of the rules of
# gitleaks (MIT License). Of their rules those are left out that need the name of a service nearby.
_KEY_PREFIXES: Final[Mapping[str, int]] = {
    "sk-": 12, "sk_": 12, "pk-": 12, "pk_": 12, "rk-": 12, "rk_": 12,  # OpenAI, Anthropic, Stripe …
    "nvapi-": 12, "xai-": 12, "hf_": 16, "gsk_": 16, "r8_": 16, "pplx-": 16, "csk-": 12,
    "ghp_": 16, "gho_": 16, "ghu_": 16, "ghs_": 16, "ghr_": 16, "github_pat_": 20,
    "glpat-": 16, "gldt-": 16, "glrt-": 16, "glcbt-": 16, "glptt-": 16, "glsoat-": 16,
    "npm_": 16, "pypi-": 16, "rubygems_": 16, "dckr_pat_": 16, "dckr_oat_": 16,
    "dop_v1_": 32, "doo_v1_": 32, "dor_v1_": 32, "shpat_": 24, "shpca_": 24, "shppa_": 24,
    "shpss_": 24, "lin_api_": 20, "ntn_": 20, "glc_": 24, "glsa_": 24, "NRAK-": 20, "PMAK-": 20,
    "pscale_": 20, "pul-": 32, "sntrys_": 20, "sntryu_": 20, "xkeysib-": 32, "xapp-": 10,
    "sq0csp-": 32, "sq0atp-": 20, "HRKU-": 20, "whsec_": 20, "AGE-SECRET-KEY-": 32, "tfp_": 32,
}  # fmt: skip
"""What keys begin with, and how many characters at least follow."""
_KEY_FORMS: Final[Mapping[str, str]] = {
    "dapi": r"dapi(?=[\w-]{0,40}[0-9])[\w-]{16,}",
    "xox": r"xox[a-z][-.](?=[\w-]{0,40}[0-9])[\w-]{10,}",
    "AKIA": r"AKIA[A-Z0-9]{16}",
    "ASIA": r"ASIA[A-Z0-9]{16}",
    "ABSK": r"ABSK[\w+/]{40,}=*",
    "AIza": r"AIza[\w-]{30,}",
    "ya29.": r"ya29\.[\w-]{20,}",
    "LTAI": r"LTAI[A-Za-z0-9]{12,}",
    "ATATT3": r"ATATT3[\w=-]{60,}",
    "EAAA": r"EAAA[\w-]{50,}",
    "SG.": r"SG\.[\w-]{16,64}\.[\w-]{16,}",
    "hvs.": r"hvs\.[\w-]{20,}",
    "hvb.": r"hvb\.[\w-]{20,}",
    "dp.": r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9]{40,}",
    ":AA": r"(?:bot)?[0-9]{8,10}:AA[\w-]{30,}",  # Telegram
    "Q~": r"\b[\w.~-]{3}[0-9]Q~[\w.~-]{31,34}",  # Azure, secrets of applications
    "AC": r"\bAC[0-9a-f]{32}\b",  # Twilio, accounts
    "SK": r"\bSK[0-9a-f]{32}\b",  # Twilio, keys
    "-us": r"\b[0-9a-z]{32}-us[0-9]{1,2}\b",  # Mailchimp
    "hooks.slack": r"https://hooks\.slack\.com/services/T\w{1,40}/B\w{1,40}/\w+",
    "webhooks": r"https://(?:\w{1,40}\.)?discord(?:app)?\.com/api/webhooks/[0-9]{1,30}/[\w-]+",
}
"""Keys of other forms, by a text that each of them has, without ``/``: JSON may escape it."""
_DISCORD_FORM: Final = r"\.[\w-]{6}\.[\w-]{27,40}"
"""A token of a bot, from its first point on."""


def _compile_keys(forms: Iterable[str]) -> re.Pattern[str]:
    """Finds keys that do not begin within a word."""
    return re.compile(f"(?<![A-Za-z0-9])(?:{'|'.join(forms)})")


_PATTERNS: Final = (
    _Pattern(
        "private_key",
        re.compile(
            r"-----BEGIN (?:[A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?|PGP MESSAGE)-----"
            r".*?(?:-----END (?:[A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?|PGP MESSAGE)-----|\Z)",
            re.DOTALL,
        ),
        ("PRIVATE KEY", "PGP MESSAGE"),
    ),
    _Pattern(
        "bearer",
        re.compile(
            r"(?:(?<=authorization:)|(?<=authorization['\"]:))\s?['\"]?(?:"
            r"(?:token|bearer|basic)\s{1,8}(?P<header>[^\s'\"<>,;]{4,})"
            r"|[\w.~+/-]{8,}=*)"
            r"|\b(?:bearer|basic)(?P<blank>\s{1,8})[\w.~+/-]{8,}=*",
            re.IGNORECASE,
        ),
        ("earer", "EARER", "asic", "ASIC", "uthorization", "UTHORIZATION"),
        is_match=_is_authorization,
    ),
    _Pattern(
        "jwt",
        re.compile(r"(?<![A-Za-z0-9])eyJ[\w-]{8,}(?:\.[\w-]{2,}(?:\.[\w-]*)?)?"),
        ("eyJ",),
        is_match=_has_payload,
    ),
    _Pattern(
        "api_key",
        _compile_keys(rf"{prefix}[\w-]{{{least},}}" for prefix, least in _KEY_PREFIXES.items()),
        tuple(prefix for prefix in _KEY_PREFIXES if not prefix[:-1].isalnum()),
        tuple(dict.fromkeys(prefix[:-1] for prefix in _KEY_PREFIXES if prefix[:-1].isalnum())),
        is_match=_is_key,
    ),
    _Pattern(
        "api_key",
        _compile_keys(_KEY_FORMS.values()),
        tuple(_KEY_FORMS),
    ),
    _Pattern(
        "api_key", re.compile(_DISCORD_FORM), before=re.compile(r"\b[MNO][\w-]{23,27}\Z")
    ),
    _Pattern(
        "password",
        re.compile(
            r"\b(?P<name>\w{0,40}(?:password|passwd|secret|[_-]key|token)|pwd|(?:account|sharedaccess)key)"
            r"(?:=|(?P<wide>\s?[:=]\s?))['\"]?"
            r"(?P<value>(?(wide)(?=[^\s'\"&;,<>()]{0,99}[0-9])[^\s'\"&;,<>()]{8,}"
            r"|[^\s'\"&;,<>()]{4,}))"
            r"|\bsig=[\w%+/-]{20,}=*"
            r"|(?<=://)[^\s/:@]{0,256}:[^\s/@]{1,256}(?=@)",
            re.IGNORECASE,
        ),
        ("sig=", "assw", "ASSW", "pwd", "PWD", "ecret", "ECRET", "_key", "_KEY", "ccountKey",
         "ccessKey", "-key", "-KEY", "-Key",
         "oken=", "OKEN=", "@", "Pwd", "_Key"),
        is_match=_is_password,
    ),
    _Pattern(
        "email",
        re.compile(r"(?:@|%40|\uff20)(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}"),
        ("@", "%40", "\uff20"),
        before=re.compile(r"[\w.!#$%&'*+/=?^`{|}~-]{1,256}\Z"),
    ),
    _Pattern(
        "credit_card",
        re.compile(
            r"(?<!(?<![0-9.])0\.)(?<![0-9])[0-9](?:[ \u00a0\u202f-]?[0-9]){12,}"
            r"|[0-9]{4}(?:[\s.-]{1,2}[0-9]{2,7}){2,4}"
        ),
        is_match=_is_card,
    ),
    _Pattern(
        "phone", re.compile(r"(?<![\w)])\+[1-9](?:[ ()./-]{0,3}[0-9]){6,14}(?![0-9])"), ("+",)
    ),
)  # fmt: skip
"""In the order in which they are searched."""
# The same of bytes. A regular expression for all of them would take ten times as long.
_HINTS: Final = tuple(
    dict.fromkeys(hint.encode() for pattern in _PATTERNS for hint in pattern.hints)
)
_PREFIXES: Final = tuple(prefix.encode() for one in _PATTERNS for prefix in one.prefixes)
_DISCORD_BYTES: Final = re.compile(_DISCORD_FORM.encode())


class Redactor:
    """Redacts the parts of one request after the other, by the same rules."""

    def __init__(self, config: RedactionConfig) -> None:
        self._patterns = [
            *(pattern for pattern in _PATTERNS if pattern.name in config.builtin),
            *(_Pattern(name, re.compile(text)) for name, text in config.patterns.items()),
        ]
        self._needs_decoding = bool(config.patterns or config.fields)
        self._clean: dict[str, None] = {}
        names = [field.lower() for field in config.fields]
        self._quoted_fields = _compile_quoted_fields([name for name in names if "." not in name])
        self._names = frozenset(name for name in names if "." not in name)
        self._paths = frozenset(tuple(name.split(".")) for name in names if "." in name)
        hidden = {*self._names, *(path[-1] for path in self._paths)}
        self._answer_names = frozenset(
            name for name, others in ANSWER_FIELDS.items() if hidden & {name, *others}
        )

    def is_clean(self, data: bytes) -> bool:
        """Whether no rule can find anything in this JSON, as far as its bytes show.

        Without escaped characters, what a built-in pattern needs is in the bytes, too.
        """
        if self._needs_decoding or b"\\u" in data:
            return False
        for hint in _HINTS:
            if hint in data:
                return False
        if b";base64," in data or _DISCORD_BYTES.search(data):
            return False
        if _CARD_DIGITS in data.translate(_DIGITS_AS_ZERO, _CARD_SEPARATORS):
            return False
        for piece in data.replace(b"_", b"-").split(b"-"):
            if piece.endswith(_PREFIXES):
                return False
        if len(data) >= _BASE64_LENGTH:
            for text in data.split(b'"'):
                if len(text) >= _BASE64_LENGTH and b" " not in text:
                    return False
        return True

    def redact(self, part: str, value: Any, places: list[str]) -> Any:
        """A JSON value without what the rules find; adds where it was to ``places``.

        ``part`` is ``request``, ``response`` or another part of the record.
        """
        return _Redaction(self._build_rules(self._names), places).run(part, value)

    def redact_answer(self, value: Any, places: list[str]) -> Any:
        """The same for a ``RecordedAnswer``, whose fields have names in other protocols, too."""
        names = self._names | self._answer_names
        return _Redaction(self._build_rules(names), places).run("answer", value)

    def _build_rules(self, names: frozenset[str]) -> "_Rules":
        return _Rules(self._patterns, names, self._paths, self._quoted_fields, self._clean)


class _Rules(Struct, frozen=True):
    """What is searched for. ``clean`` are short strings in which nothing was found."""

    patterns: Sequence[_Pattern]
    names: frozenset[str]
    paths: frozenset[tuple[str, ...]]
    quoted_fields: re.Pattern[str] | None
    clean: dict[str, None]


class _Redaction:
    """Redacts one JSON value."""

    def __init__(self, rules: _Rules, places: list[str]) -> None:
        self._clean = rules.clean
        self._patterns = rules.patterns
        self._names = rules.names
        self._paths = rules.paths
        self._quoted_fields = rules.quoted_fields
        self._places = places
        self._keys: list[str | int] = []
        """The path to the current value."""
        self._part = ""
        self._nested = 0

    def run(self, part: str, value: Any) -> Any:
        """See ``Redactor.redact``."""
        self._part = part
        return self._redact(value)

    def _redact(self, value: Any) -> Any:
        if type(value) is str:
            return self._redact_string(value)
        if type(value) is dict:
            if len(self._keys) >= _MAX_DEPTH:
                return self._replace("depth")
            return dict(self._redact_item(key, one) for key, one in value.items())
        if type(value) is list:
            if len(self._keys) >= _MAX_DEPTH:
                return self._replace("depth")
            if value and type(value[0]) in (int, float) and not self._needs_items():
                return self._redact_numbers(value)
            return [self._redact_element(index, one) for index, one in enumerate(value)]
        return self._redact_number(value) if type(value) in (int, float) else value

    def _needs_items(self) -> bool:
        """Whether a rule may name an element of a list by its number."""
        return bool(self._paths)

    def _redact_numbers(self, value: list[Any]) -> list[Any]:
        return [
            one if type(one) is float or (type(one) is int and abs(one) < 10**12) else
            self._redact_element(index, one)
            for index, one in enumerate(value)
        ]  # fmt: skip

    def _redact_number(self, value: float) -> Any:
        """A number that a pattern finds, such as that of a card, is replaced."""
        if type(value) is not int or abs(value) < 10**12:
            return value
        text = str(value)
        redacted = self._redact_string(text)
        return value if redacted == text else redacted

    def _redact_element(self, index: int, value: Any) -> Any:
        self._keys.append(index)
        redacted = self._replace("field") if self._is_hidden() else self._redact(value)
        self._keys.pop()
        return redacted

    def _redact_item(self, key: str, value: Any) -> tuple[str, Any]:
        name = self._search(key) if len(key) <= MAX_STRING else "[redacted:long]"
        self._keys.append(name)
        if value is not None and (key.lower() in self._names or self._is_hidden()):
            redacted: Any = self._replace("field")
        else:
            redacted = self._redact(value)
        self._keys.pop()
        return name, redacted

    def _is_hidden(self) -> bool:
        """Whether a path of the rules leads here; ``*`` stands for any one step."""
        return bool(self._paths) and any(
            len(path) == len(self._keys)
            and all(
                step in ("*", str(key).lower())
                for step, key in zip(path, self._keys, strict=True)
            )
            for path in self._paths
        )  # fmt: skip

    def _redact_string(self, text: str) -> str:
        if len(text) >= _BASE64_LENGTH and _BASE64.fullmatch(text):
            return self._replace(_describe_data(text))
        if len(text) > MAX_STRING:
            return self._replace(f"{len(text)} characters")
        if text.lstrip()[:1] in ("{", "["):
            return self._redact_nested(text)
        return self._search(text)

    def _redact_nested(self, text: str) -> str:
        """A string that may be JSON itself."""
        try:
            value = decode_json(text)
        except msgspec.DecodeError:
            return self._search(text)
        if self._nested >= _MAX_NESTED_JSON:
            return self._replace("nested")
        self._nested += 1
        keys, self._keys = self._keys, []
        places, self._places = self._places, []
        redacted = self._redact(value)
        found, self._places, self._keys = self._places, places, keys
        self._nested -= 1
        if found:
            self._add_place()
            text = msgspec.json.encode(redacted).decode()
        return self._search(text)

    def _search(self, text: str) -> str:
        """The text without what the patterns find."""
        if text in self._clean:
            return text
        original = text
        if ";base64," in text:
            text = _DATA_URL.sub(lambda match: self._replace(_describe_data(match[0])), text)
        if self._quoted_fields is not None and ('"' in text or "'" in text):
            text = self._quoted_fields.sub(self._replace_quoted, text)
        for pattern in self._patterns:
            if not pattern.may_match(text):
                continue
            before, text = text, pattern.replace_matches(text)
            if text is not before and text != before:
                self._add_place()
        is_short = len(text) <= _MAX_CLEAN_LENGTH
        if text is original and is_short and len(self._clean) < _MAX_CLEAN:
            self._clean[text] = None
        return text

    def _replace_quoted(self, match: re.Match[str]) -> str:
        """A hidden field of JSON, or of Python's notation, that stands within a text."""
        quote = match["quote"]
        return f"{match['name']}{quote}{self._replace('field')}{quote}"

    def _replace(self, reason: str) -> str:
        self._add_place()
        return f"[redacted:{reason}]"

    def _add_place(self) -> None:
        if len(self._places) < _MAX_PLACES:
            steps = (f"[{key}]" if isinstance(key, int) else f".{key[:64]}" for key in self._keys)
            place = self._part + "".join(steps)
            if place not in self._places[-1:]:
                self._places.append(place)


def _describe_data(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"base64 {len(text)} characters sha256 {digest}"


def _compile_quoted_fields(names: Sequence[str]) -> re.Pattern[str] | None:
    """Finds fields with these names in a text: in code fences, in lines, behind other text.

    A value that is an object or a list is not found: this is best effort, unlike fields of JSON.
    """
    if not names:
        return None
    words = "|".join(map(re.escape, names))
    return re.compile(
        rf"""(?P<name>(?P<quote>['"])(?:{words})(?P=quote)\s{{0,8}}:\s{{0,8}})"""
        r"""(?!['"]\[redacted)(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[\w.+-]+)""",
        re.IGNORECASE | re.DOTALL,
    )

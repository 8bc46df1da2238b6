"""The fields of OpenAI-like requests that may not be dropped with a 200.

They refer to what a server keeps, or ask for an answer that is no text.
"""

from typing import Final

from protocols.core.stateful import StatefulField

CHAT_STATEFUL_FIELDS: Final = (
    StatefulField("prompt_cache_key", "reported", "a hint for the prompt cache: same answer"),
    StatefulField("prompt_cache_retention", "reported", "a hint for the prompt cache: same answer"),
    StatefulField("prompt_cache_options", "reported", "a hint for the prompt cache: same answer"),
    StatefulField("cache_control", "reported", "a hint for the prompt cache: same answer"),
    StatefulField("cache_salt", "reported", "separates prompt caches: same answer"),
    StatefulField(
        "session_id",
        "reported",
        "chooses a worker; the request has the whole history: same answer",
    ),
    StatefulField(
        "session_params",
        "forwarded",
        "a session whose history SGLang keeps",
        "The model's workers keep no sessions: send the whole conversation.",
    ),
    StatefulField(
        "kv_transfer_params",
        "forwarded",
        "cache blocks of another vLLM worker",
        "The model's workers do not take over cache blocks.",
    ),
    StatefulField(
        "modalities",
        "forwarded",
        "asks for audio or an image: text alone is another answer",
        "The model's workers answer with text only.",
        starts=(["text"],),
    ),
    StatefulField(
        "messages[].content[].file.file_id",
        "forwarded",
        "a file of the worker's service",
        "The model's workers do not have files of another service.",
    ),
    StatefulField(
        "store",
        "reported",
        "no later request of chat completions depends on it; reading a completion is 404",
    ),
)

"""What the engine understands of a model, for people and for the gateway."""

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from backends.torch.model_files import ENGINE_TASKS, ModelError
from backends.torch.settings import TorchSettings


class ModelFeatures(Struct, frozen=True, omit_defaults=True):
    """What the engine understands of a model that generates text, from its chat template."""

    chat: bool = False
    """Whether it has a chat template."""
    tool_calls: str | None = None
    """The family in whose format it writes calls; None: its calls are not understood."""
    found_by: str | None = None
    """How that format was found out."""
    enforced: Literal["always", "with options", "never"] = "never"
    """When a grammar enforces calls; otherwise they are parsed."""
    functions_in: Literal["chat template", "system message"] | None = None
    """What puts the functions into the prompt."""
    reasoning: str | None = None
    """The marks around reasoning."""
    keeps_reasoning: bool = False
    """Whether earlier reasoning goes back to the model."""
    problem: str | None = None
    """Why calls are not understood."""

    def describe(self) -> Iterator[tuple[str, str]]:
        """Subjects and texts for a person."""
        yield "chat", "by the chat template" if self.chat else "no: it has no chat template"
        if self.tool_calls is None:
            yield "tool calls", f"not understood: {self.problem}"
        else:
            yield "tool calls", f"{self.tool_calls} (found by: {self.found_by})"
            parsed = "; otherwise they are parsed" if self.enforced == "with options" else ""
            yield "calls are enforced", f"{self.enforced}{parsed}"
            yield "functions are in", f"the {self.functions_in}"
        yield "reasoning", self.reasoning or "none"
        kept = "goes back to the model" if self.keeps_reasoning else "is not in the prompt"
        yield "earlier reasoning", kept


def inspect_settings(settings: TorchSettings) -> ModelFeatures | str:
    """What is understood of a local model, or why it can't be read. Imports torch."""
    try:
        from backends.torch.loaded_model import inspect_model  # noqa: PLC0415

        task = ENGINE_TASKS.get(settings.task)
        return inspect_model(settings.path, task, settings.chat_template)
    except ImportError as error:
        return f"missing dependency ({error}): pip install 'interlingua[torch]'"
    except ModelError as error:
        return str(error)

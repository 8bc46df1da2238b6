"""Classification of texts equals transformers' pipeline."""

from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from backends.torch.classification import load_classifier
from backends.torch.ipc import (
    ClassesEvent,
    ClassifyCommand,
    EngineEvent,
    RequestFailedEvent,
    RequestFinishedEvent,
)
from backends.torch.loader import ModelLocation, find_model
from backends.torch.settings import TorchSettings
from tests.unit.backends.torch.test_rerank import run, save_model

LABELS = {0: "negative", 1: "neutral", 2: "positive"}
TEXTS = ("a good day", "bad", "a longer text on red cars")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classifier")
    save_model(path, labels=3, id2label=LABELS)
    return path


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Any:
    return load_classifier(ModelLocation(str(folder), "classify"), TorchSettings(path=""))


def classify(encoder: Any, command: ClassifyCommand) -> ClassesEvent:
    classes, finished = run(encoder, command)
    assert isinstance(classes, ClassesEvent)
    assert isinstance(finished, RequestFinishedEvent)
    return classes


def test_classifier_whose_labels_have_names_is_found_to_classify(
    folder: Path, tmp_path: Path
) -> None:
    save_model(tmp_path, labels=3)

    assert find_model(str(folder), print).task == "classify"
    assert find_model(str(tmp_path), print).task == "embed"


@pytest.mark.parametrize(
    ("activation", "function"), [(None, "softmax"), (True, "softmax"), (False, "none")]
)
def test_numbers_are_those_of_transformers(
    folder: Path, classifier: Any, activation: bool | None, function: str
) -> None:
    command = ClassifyCommand(1, TEXTS, activation=activation)
    classes = classify(classifier, command)

    reference: Any = pipeline("text-classification", model=str(folder), top_k=None)
    for text, label, numbers in zip(TEXTS, classes.labels, classes.numbers, strict=True):
        [expected_scores] = reference([text], function_to_apply=function)
        expected = {one["label"]: one["score"] for one in expected_scores}
        assert dict(zip(LABELS.values(), numbers, strict=True)) == pytest.approx(expected, abs=1e-5)
        assert label == max(expected, key=expected.__getitem__)


@pytest.mark.parametrize(
    ("problem", "total"), [("multi_label_classification", None), ("single_label_classification", 1)]
)
def test_labels_exclude_each_other_unless_the_model_is_multi_label(
    tmp_path: Path, problem: str, total: float | None
) -> None:
    location = save_model(tmp_path, labels=3, problem_type=problem)
    [numbers] = classify(
        load_classifier(location, TorchSettings(path="")), ClassifyCommand(1, ("a",))
    ).numbers

    assert all(0 < number < 1 for number in numbers)
    assert (sum(numbers) == pytest.approx(1)) is (total is not None)


def test_regression_has_no_activation(tmp_path: Path) -> None:
    encoder = load_classifier(
        save_model(tmp_path, problem_type="regression"), TorchSettings(path="")
    )

    plain, raw = (
        classify(encoder, ClassifyCommand(1, ("a",), activation=one)) for one in (None, False)
    )
    assert plain.numbers == raw.numbers


def test_one_label_that_is_no_regression_has_a_probability(tmp_path: Path) -> None:
    encoder = load_classifier(save_model(tmp_path), TorchSettings(path=""))

    [[number]] = classify(encoder, ClassifyCommand(1, ("a",))).numbers
    assert 0 < number < 1


def test_tokens_are_taken_as_they_are(classifier: Any) -> None:
    ids = tuple(classifier.tokenizer.encode("bad", add_special_tokens=False))
    by_tokens = classify(classifier, ClassifyCommand(1, (ids,)))

    by_text = classify(classifier, ClassifyCommand(1, ("bad",), special_tokens=False))

    assert by_tokens.numbers == by_text.numbers
    assert by_tokens.numbers != classify(classifier, ClassifyCommand(1, ("bad",))).numbers


@pytest.mark.parametrize(("max_tokens", "kept_tokens"), [(-1, 48), (4, 4)])
def test_long_input_is_truncated_if_requested(
    classifier: Any, max_tokens: int, kept_tokens: int
) -> None:
    command = ClassifyCommand(1, ("x" * 60,), max_tokens=max_tokens, special_tokens=False)
    cut = ClassifyCommand(1, ("x" * kept_tokens,), special_tokens=False)

    assert classify(classifier, command).numbers == classify(classifier, cut).numbers


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (ClassifyCommand(1, ("x" * 60,)), "too_long"),
        (ClassifyCommand(1, ((10**6,),)), "invalid"),
        (ClassifyCommand(1, ("a",), max_tokens=0), "invalid"),
    ],
)
def test_input_that_cannot_be_classified_is_rejected(
    classifier: Any, command: ClassifyCommand, kind: str
) -> None:
    events: list[EngineEvent] = run(classifier, command)

    [failed] = events
    assert isinstance(failed, RequestFailedEvent)
    assert (failed.kind, failed.param) == (kind, "input")

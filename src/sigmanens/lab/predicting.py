"""``sigmanens predict`` and ``sn.load_run``: a finished training answers for new inputs."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sigmanens.ensemble.ensemble import SigmaEnsemble, load
from sigmanens.ensemble.prediction import Prediction
from sigmanens.errors import DataError, InputError, RunError, warn
from sigmanens.evaluation.abstention import Abstention, fit_abstention
from sigmanens.lab.backbones.registry import base_network
from sigmanens.lab.config import TrainConfig
from sigmanens.lab.data import LazyPictures, Pictures
from sigmanens.lab.data.given import GivenPictures, given_pictures, given_texts, name_of
from sigmanens.lab.data.texts import encode, load_tokenizer
from sigmanens.lab.plain import to_json
from sigmanens.lab.rows import member_logits
from sigmanens.lab.runs import network_seed, read_config, read_inputs

FORMATS = ("csv", "jsonl")


@dataclass(frozen=True, eq=False)
class Answers:
    """What an ensemble predicts for B inputs, by name.

    Attributes:
        examples: the inputs: paths and Pillow pictures, or texts.
        names: what they are called: paths, or the texts themselves.
        prediction: probabilities (B, C) and entropies (B,) in nats.
        classes: names of the C classes.
        abstention: the rule when not to answer, if one was asked for.
    """

    examples: tuple[Any, ...]
    names: tuple[str, ...]
    prediction: Prediction
    classes: tuple[str, ...]
    abstention: Abstention | None = None

    def __len__(self) -> int:
        return len(self.names)

    def rows(self) -> list[dict[str, Any]]:
        """One dict an input: ``input``, ``class``, ``probability`` and the uncertainty in nats.

        ``entropy`` = ``expected_entropy`` (mean entropy of the members) + ``modulation`` (mutual
        information of label and member), of the averaged distribution before the temperature, which
        acts on ``probability`` alone. With a rule also ``abstain``: true where it gives no answer.
        """
        found, rule = self.prediction, self.abstention
        columns: dict[str, list[Any]] = {
            "input": list(self.names),
            "class": [self.classes[i] for i in found.labels.tolist()],
            "probability": found.confidence.tolist(),
            "entropy": found.entropy.tolist(),
            "expected_entropy": found.expected_entropy.tolist(),
            "modulation": found.modulation.tolist(),
        }
        if rule is not None:
            columns["abstain"] = rule.abstains(found.confidence).tolist()
        values = zip(*columns.values(), strict=True)
        return [to_json(dict(zip(columns, row, strict=True))) for row in values]

    def least_certain(self, count: int) -> Answers:
        """The inputs of highest entropy, the highest first: what to look at or to label next.

        Entropy counts what each member doubts and what they disagree about; equal ones keep their
        order.

        Raises:
            InputError: if count is below 1.
        """
        if count < 1:
            raise InputError(f"count is {count}; expected at least 1")
        first = self.prediction.entropy.argsort(descending=True, stable=True)[:count]
        order = first.tolist()
        return replace(
            self, examples=tuple(self.examples[i] for i in order),
            names=tuple(self.names[i] for i in order), prediction=self.prediction.reordered(first),
        )  # fmt: skip

    def text(self, form: str = "csv") -> str:
        """The rows as "csv" with a head, or "jsonl"; InputError for another form."""
        if form not in FORMATS:
            raise InputError(f"form is {form!r}; expected one of {', '.join(FORMATS)}")
        rows = self.rows()
        if form == "jsonl":
            return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(rows[0])
        for row in rows:
            writer.writerow(str(v).lower() if isinstance(v, bool) else v for v in row.values())
        return buffer.getvalue()

    def write_page(self, path: str | Path) -> Path:
        """Write the rows with small pictures, or the texts, as one self-contained HTML file."""
        from sigmanens.lab.report.answers import write_answers

        said = "" if self.abstention is None else str(self.abstention)
        return write_answers(self.rows(), self.examples, said, Path(path))


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """A finished run of ``sigmanens train``; neither its training data nor its splits are read.

    Attributes:
        folder: the run.
        ensemble: from its checkpoint, with the fitted temperature.
        inputs: ``inputs.json``: ``kind`` ("pictures" or "texts"), ``classes``, and how inputs are
            read: ``size``, ``crop``, ``channels``, ``mean``, ``std``; or ``tokenizer``, ``length``,
            ``column``.
    """

    folder: Path
    ensemble: SigmaEnsemble
    inputs: Mapping[str, Any]

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TrainedRun:
        """Open a run; see :func:`sigmanens.load_run`."""
        folder = Path(folder).expanduser()
        inputs = read_inputs(folder)
        config = TrainConfig.from_dict(read_config(folder))
        base = base_network(config.model, len(inputs["classes"]), network_seed(config.seed))
        ensemble = load(folder / "checkpoint", base=base)
        return cls(folder, ensemble.to("cuda" if torch.cuda.is_available() else "cpu"), inputs)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities."""
        return tuple(self.inputs["classes"])

    def predict(
        self, inputs: Any, *, abstain_at_risk: float | None = None, batch: int = 256
    ) -> Answers:
        """Predict new inputs; one that cannot be read stops the call, and is named.

        Args:
            inputs: for pictures: a path, a folder (all pictures below it) or a Pillow picture; for
                texts: a text, or a ``.csv``, ``.jsonl`` or ``.json`` file with the column of the
                training, or a ``.txt`` file of lines; or a list of such. In a list a string is a
                text, and a ``Path`` a file.
            abstain_at_risk: r: answer only where at most this share of the answers is wrong, see
                :meth:`abstention`. If that cannot be promised, nothing is answered, with a warning.
            batch: inputs in a pass.

        Raises:
            DataError: for an input that is missing or cannot be read. InputError: for one of
                another type, or a risk outside (0, 1). RunError: as :meth:`abstention`.
        """
        rule = None if abstain_at_risk is None else self.abstention(abstain_at_risk)
        if rule is not None and rule.threshold is None:
            warn(str(rule))
        examples, names, x = self._read(inputs)
        logits = member_logits(self.ensemble, batch)(x)
        prediction = Prediction.from_logits(logits, float(self.ensemble.temperature))
        return Answers(tuple(examples), tuple(names), prediction, self.classes, rule)

    @cached_property
    def tokenizer(self) -> Any:
        """Of texts, from where ``inputs.json`` says; read once."""
        return load_tokenizer(self.inputs["tokenizer"])

    def read(self, inputs: Any) -> Tensor:
        """Inputs as the network takes them: pictures (B, C, H, W), or tokens (B, L) of texts.

        Use it to feed an exported file (:func:`sigmanens.export_onnx`). Inputs and errors are those
        of :meth:`predict`.
        """
        x = self._read(inputs)[2]
        return x if isinstance(x, Tensor) else x[:]

    def _read(self, inputs: Any) -> tuple[list[Any], list[str], Pictures]:
        """The inputs one by one, what they are called, and what the network takes for them."""
        how = self.inputs
        if how["kind"] == "texts":
            texts = given_texts(inputs, how["column"])
            return texts, texts, encode(texts, self.tokenizer, how["length"])
        pictures = given_pictures(inputs)
        names = [name_of(picture, i) for i, picture in enumerate(pictures)]
        shape = (len(pictures), how["channels"], *how["size"])
        x = LazyPictures(GivenPictures(pictures, how), torch.arange(len(pictures)), shape)
        return pictures, names, x

    def validation(self) -> tuple[Prediction, Tensor]:
        """What the run predicted for its validation examples, and their classes (n,).

        Raises:
            RunError: if the run's predictions are gone.
        """
        _, labels, held_out = self._predicted()
        return held_out, labels

    def abstention(self, risk: float, delta: float = 0.05) -> Abstention:
        """The rule that answers most while at most a share ``risk`` of its answers is wrong.

        It is fitted on the run's validation predictions and holds with probability 1 − δ over
        them, for inputs like them: exchangeable, not trained on. They also chose the temperature,
        which may reorder inputs, and under ``recipe.keep: best`` the epoch: two numbers, that
        weaken the promise slightly. See :mod:`sigmanens.evaluation.abstention`.

        Raises:
            InputError: for a risk or δ outside (0, 1). RunError: if the run's predictions are gone.
        """
        test, labels, held_out = self._predicted()
        correct = held_out.labels == labels
        return fit_abstention(held_out.confidence, correct, risk, test.confidence, delta)

    def _predicted(self) -> tuple[Prediction, Tensor, Prediction]:
        """Test predictions, and the classes and predictions of the validation examples."""
        path, name = self.folder / "predictions.safetensors", self.inputs["predictions"]
        try:
            with safe_open(path, "pt") as file:
                labels = file.get_tensor("validation_labels")
                held_out = file.get_tensor(f"{name}.validation_member_log_probs")
                test = file.get_tensor(f"{name}.member_log_probs")
        except (OSError, SafetensorError) as e:
            raise RunError(f"{path}, the run's predictions, cannot be read: {e}") from e
        seen, others = (
            Prediction.from_logits(t, float(self.ensemble.temperature)) for t in (held_out, test)
        )
        return others, labels, seen


def told_inputs(arguments: Iterable[str], lines: Iterable[str], kind: str) -> list[Any]:
    """What a command line names: files and folders, and "-" for a path or a text on each line.

    Raises:
        DataError: if a file of texts is not there, or the lines are not in the encoding of the
            terminal.
    """
    found: list[Any] = []
    for argument in arguments:
        if argument != "-":
            if kind == "texts" and not Path(argument).exists():
                raise DataError(
                    f"there is no file {argument}; texts themselves are read from standard input: "
                    "echo TEXT | sigmanens predict RUN -"
                )
            found.append(Path(argument))
            continue
        try:
            given = [line.rstrip("\r\n") for line in lines if line.strip()]
        except UnicodeDecodeError as e:
            raise DataError(f"standard input cannot be read: {e}; expected UTF-8") from e
        found += given if kind == "texts" else map(Path, given)
    return found

"""A folder in the layout of the Hugging Face hub: the ensemble, its config and a model card.

Nothing here goes online; ``huggingface_hub.upload_folder`` publishes the folder in one call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.errors import CheckpointError, InputError
from sigmanens.saving.checkpoint import write_atomic
from sigmanens.training.loss import EnsembleLoss

__all__ = ["Metrics", "model_card", "save_folder"]

Metrics = Mapping[str, float | None] | Mapping[str, Mapping[str, float | None]]
"""``{metric: value}``, or ``{row: {metric: value}}`` for several models or data sets."""

_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
    "ForAudioClassification": "audio-classification",
}


def save_folder(
    ensemble: SigmaEnsemble,
    directory: str | Path,
    *,
    processor: Any = None,
    shared: str = "auto",
    base_model: str | None = None,
    license: str | None = None,
    metrics: Metrics | None = None,
    datasets: list[str] | None = None,
    loss_fn: EnsembleLoss | None = None,
) -> Path:
    """Save an ensemble with the base's ``config.json``, its tokenizer and a generated README.md.

    Args:
        ensemble: what to save; :func:`sigmanens.load` reads the folder.
        directory: folder to write into; made if missing.
        processor: tokenizer or image processor to save along.
        shared: as for :meth:`SigmaEnsemble.save_pretrained`.
        base_model, license, metrics, datasets, loss_fn: as for :func:`model_card`.

    Returns:
        the path of the weights file.

    Raises:
        CheckpointError, InputError: as ``save_pretrained`` and ``model_card``.
    """
    card = model_card(
        ensemble,
        base_model=base_model,
        license=license,
        metrics=metrics,
        datasets=datasets,
        loss_fn=loss_fn,
    )
    weights = ensemble.save_pretrained(directory, shared)
    for part in (ensemble.base_config, processor):
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(directory)
    try:
        write_atomic(Path(directory) / "README.md", card.encode())
    except OSError as e:
        raise CheckpointError(f"could not write the model card: {e.strerror or e}") from e
    return weights


def model_card(
    ensemble: SigmaEnsemble,
    *,
    base_model: str | None = None,
    license: str | None = None,
    metrics: Metrics | None = None,
    datasets: list[str] | None = None,
    loss_fn: EnsembleLoss | None = None,
) -> str:
    """The model card of an ensemble: what it is, how to load it, how good it is.

    Args:
        ensemble: the ensemble.
        base_model: hub name of the base; by default the one its config was loaded by, unless that
            was a folder.
        license: identifier such as "apache-2.0"; that of the base usually binds.
        metrics: one row of metrics or several (fractions and nats); None for a missing value.
        datasets: hub names of the data it was trained on.
        loss_fn: what it was trained with.

    Returns:
        Markdown with a YAML header, as the hub reads it.

    Raises:
        InputError: for metrics that are neither numbers nor rows of numbers.
    """
    rows = _rows(metrics)
    kind = type(ensemble.network)
    base_model = base_model or _hub_name(ensemble.base_config)
    data = ModelCardData(
        library_name="sigmanens",
        license=license,
        base_model=base_model,
        datasets=datasets,
        pipeline_tag=next((t for end, t in _TASKS.items() if kind.__name__.endswith(end)), None),
        tags=["sigmanens", "ensemble", "uncertainty", "calibration"],
    )
    base = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "its base"
    report, plan, members = ensemble.report, ensemble.plan, ensemble.num_members
    facts = [
        f"{members} members on one {kind.__name__}; {len(report.converted)} normalisation layers "
        f"with scales per member ({plan.scale}, init {plan.init}), heads: {plan.head}",
        f"{report.base_parameters + report.added_parameters:,} parameters, of which "
        f"{report.added_parameters:,} are added by the members",
        f"task: {ensemble.task or 'multiclass'}",
        f"temperature of the averaged distribution: {float(ensemble.temperature):g}",
    ]
    if loss_fn is not None and loss_fn.diversity is not None:
        facts.append(f"trained with `{loss_fn.diversity!r}`")
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {kind.__name__} as an ensemble of {members}",
        f"A σN-Ens ([arXiv 2607.23860](https://arxiv.org/abs/2607.23860)) on {base}: members share "
        "all weights but the scales of the normalisation layers and their heads. It says how "
        "certain it is, and which part of the uncertainty the members disagree about.",
        f"## How to load\n\n```python\n{_loading(kind, base_model)}\n```",
        "The base must have the weights it had at conversion; `load` checks that.",
        "## What it is\n\n" + "\n".join(f"* {fact}" for fact in facts),
    ]
    if rows:
        sections.append(
            f"## Metrics\n\n{_table(rows)}\n\n"
            "Accuracies and calibration errors are fractions, losses and entropies nats."
        )
    sections.append(
        f"## Limits\n\nA prediction costs about {members} passes of the base. Uncertainty was "
        "learnt on the data it was trained on; on other data, measure before you rely on it."
    )
    return "\n\n".join(sections) + "\n"


def _hub_name(config: Any) -> str | None:
    """The name a base was loaded by, if it can be one on the hub and is no folder here."""
    name = str(getattr(config, "_name_or_path", "") or "")
    looks_right = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    return name if looks_right and not Path(name).exists() else None


def _loading(kind: type, base_model: str | None) -> str:
    name = kind.__name__
    lines = ["import sigmanens as sn", "from huggingface_hub import snapshot_download"]
    folder = 'folder = snapshot_download("…")  # the name of this repository, or a local folder'
    if kind.__module__.startswith("transformers."):
        lines += [
            f"from transformers import AutoConfig, {name}",
            "",
            folder,
            "config = AutoConfig.from_pretrained(folder)",
            f'base = {name}.from_pretrained("{base_model or "…"}", config=config)',
        ]
    else:
        lines += ["", folder, f"base = {name}(…)  # with its pretrained weights"]
    lines += [
        "ens = sn.load(folder, base).eval()",
        "pred = ens.predict(inputs)  # a tensor, or a dict of keyword inputs",
        "pred.probs, pred.entropy, pred.modulation",
    ]
    return "\n".join(lines)


def _rows(metrics: Metrics | None) -> dict[str, Mapping[str, float | None]]:
    """Metrics as rows by name; a single row is called "ensemble"."""
    if not metrics:
        return {}
    nested = [isinstance(v, Mapping) for v in metrics.values()]
    rows: Any = metrics if all(nested) else {"ensemble": metrics}
    for row in rows.values():
        for key, value in row.items():
            if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
                raise InputError(
                    f"metric {key!r} is {value!r}; expected {{metric: number}} or "
                    "{row: {metric: number}}"
                )
    return dict(rows)


def _table(rows: Mapping[str, Mapping[str, float | None]]) -> str:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = ["" if row.get(c) is None else f"{row[c]:.4g}" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)

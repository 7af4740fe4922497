"""One ``metrics.json`` from the folders of a study's trainings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.material import load_material
from sigmanens.lab.bench.measure import prediction_name
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.differences import Load, Row, Samples, differences
from sigmanens.lab.findings import ONE_RUN, add_findings
from sigmanens.lab.plain import to_json
from sigmanens.lab.runs import environment

_CRITERION = "validation nll_calibrated"


def gather(
    config: BenchConfig,
    finished: Mapping[Trial, Path],
    failures: Mapping[str, str],
    command: str,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything the finished trainings measured, the choice among σN-Ens and what failed.

    Args:
        config: the study.
        finished: folders of the finished trainings.
        failures: why the others failed, by key.
        command: the command line, for the record.
        earlier: ``metrics.json`` before this call, for differences whose predictions are gone.
    """
    rows: list[dict[str, Any]] = []
    histories: list[dict[str, Any]] = []
    for trial, folder in finished.items():
        found = json.loads((folder / "rows.json").read_text(encoding="utf-8"))["rows"]
        for row in found:
            row["trial"] = trial.key
            history = row.pop("epochs", None)
            if history and trial.seed == config.seeds[0]:
                histories.append({k: row.get(k) for k in ONE_RUN} | {"epochs": history})
            rows.append(row)
    add_findings(rows, histories)
    choice, material = choose(rows), load_material(config, config.seeds[0])
    return to_json(
        {
            "version": 1,
            "preset": config.study,
            "command": command,
            "environment": environment() | {"threads": 1},
            "seconds": _seconds(rows),
            "data": dict(material.names) | {"classes": material.inputs.get("classes")},
            "rows": rows,
            "histories": histories,
            "choice": choice,
            "differences": differences(rows, _samples_in(finished), earlier),
            "failures": dict(failures),
        }
    )


def _samples_in(finished: Mapping[Trial, Path]) -> Load:
    """Reads the predictions of a row from the folder of its training."""
    folders = {trial.key: folder for trial, folder in finished.items()}

    def load(row: Row) -> Samples | None:
        path, name = folders[row["trial"]] / "predictions.safetensors", prediction_name(row)
        if not path.exists():
            return None  # the rows were kept, the predictions were not
        with safe_open(path, "pt") as file:
            if f"{name}.member_log_probs" not in list(file.keys()):
                return None
            members = file.get_tensor(f"{name}.member_log_probs").double()
            found = {"log_probs": log_mean_exp(members), "labels": file.get_tensor("labels")}
            for key in ("nll_corrupted", "nll_calibrated_corrupted", "corrupted_rows"):
                if f"{name}.{key}" in list(file.keys()):
                    found[key] = file.get_tensor(f"{name}.{key}")
        return found

    return load


def choose(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The σN-Ens with the lowest temperature-scaled NLL on validation data, mean over seeds.

    Variants take no part, and a setting that lacks a seed another has takes none either.
    """
    scores: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["method"] == "sigmanens" and not row.get("variant"):
            setting = (row["tau"], row["members"], row["weight"])
            scores.setdefault(setting, []).append(row["validation"]["nll_calibrated"])
    if not scores:
        return None
    most = max(len(v) for v in scores.values())
    means = {s: sum(v) / len(v) for s, v in scores.items() if len(v) == most}
    tau, members, weight = min(means, key=lambda s: means[s])
    several = len({s[1:] for s in means}) > 1
    listed = ", ".join(
        f"τ={s[0]:g}{f' M={s[1]} λ={s[2]:g}' if several else ''}: {value:.3f}"
        for s, value in sorted(means.items())
    )
    return {
        "criterion": _CRITERION,
        "tau": tau,
        "members": members,
        "weight": weight,
        "reason": listed,
    }


def _seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of all trainings together; rows of the same separate networks count once."""
    found: dict[str, float] = {}
    for row in rows:
        trial, own = row["trial"], row["train_seconds"] or 0.0
        shared = row["method"] in (
            "single", "single_temperature", "single_finetuned", "deep_ensemble",
        )  # fmt: skip
        before = found.get(trial, 0.0)
        found[trial] = max(before, own) if shared else before + own
    return sum(found.values())

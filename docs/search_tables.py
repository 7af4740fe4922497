"""What make_tables.py writes into docs/results/search.md: each try beside the plain setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from study_tables import label_of, spread

from sigmanens.evaluation.comparison import Difference, holm, seed_difference
from sigmanens.lab.report.compare import named

Row = Mapping[str, Any]

HEAD = """# The search for a better recipe

Which change raises the *temperature-scaled* NLL of σN-Ens towards that of separate networks? Every
try is a variant of a preset (`sigmanens bench --preset digits-search`, `--preset cifar10-search`),
negative ones included; this page is made by `python docs/make_tables.py` from their `metrics.json`.

*Against plain* is NLL (T) less that of the same method at the same τ and M = 4 without the change,
seed by seed, with Student's 95 % interval: **better** or **worse** where it leaves out 0, † where
that survives Holm's correction for all tries of its table. *Gap closed*: 0 % is one network with a
temperature, 100 % as many separate networks as the plain setting has members. *Epochs* count passes
of one network over the training pictures: what the training costs, but for what late splits share.
*Compute*: multiply-adds of a prediction over those of one network.
"""


def page(results: Path) -> str:
    """The whole page, from all studies whose name ends with ``-search``."""
    parts = [HEAD]
    for folder in sorted(p.parent for p in results.glob("*-search/metrics.json")):
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        seeds = len({r["seed"] for r in metrics["rows"]})
        parts += [
            f"## {folder.name}\n",
            f"{metrics['data']['description']}; {seeds} seed{'s' if seeds > 1 else ''}.\n",
            f"    {metrics['command']}\n",
            *tries(metrics, yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))),
        ]
        notes = folder / "notes.md"
        if notes.exists():
            parts.append("\n" + notes.read_text(encoding="utf-8").strip() + "\n")
    return "\n".join(parts)


def tries(metrics: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Lines of a table: the controls first, then each try by what it gains."""
    groups: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in metrics["rows"]:
        key = (row["method"], row["members"], row["tau"], row["variant"] or "")
        groups.setdefault(key, {})[row["seed"]] = row
    plain = {(key[0], key[2]): by for key, by in groups.items() if not key[3] and key[0] in _VARIED}
    one = _mean(groups, "single_temperature")
    many = _mean(groups, "deep_ensemble")
    epochs = _epochs(metrics, config)
    controls, tried = [], []
    for key, by in groups.items():
        gap: Difference | float | None = None
        if key[3] and (before := plain.get((key[0], key[2]))):
            shared = sorted(set(by) & set(before))
            both = [[of[s]["nll_calibrated"] for s in shared] for of in (by, before)]
            several = len(shared) > 1
            gap = seed_difference(*both) if several else both[0][0] - both[1][0]
        (controls if gap is None else tried).append((key, list(by.values()), gap))
    controls.sort(key=lambda item: mean(r["nll_calibrated"] for r in item[1]))
    tried.sort(key=lambda item: _value(item[2]))
    told = [gap for *_, gap in tried if isinstance(gap, Difference)]
    kept = holm([gap.p for gap in told])
    stars = {id(gap) for gap, keep in zip(told, kept, strict=True) if keep and gap.sign}
    lines = [
        "| try | method | M | τ | NLL (T) | against plain | gap closed | NLL | ECE | accuracy | "
        "disagreement | epochs | compute |",
        "| --- " * 13 + "|",
    ]
    for key, rows, gap in [*controls, *tried]:
        at = mean(r["nll_calibrated"] for r in rows)
        closed = "" if one is None or many is None else f"{(one - at) / (one - many):.0%}"
        cells = [
            key[3].replace("_", " "),
            label_of(rows[0]),
            str(key[1]),
            "" if key[2] is None else f"{key[2]:g}",
            spread([r["nll_calibrated"] for r in rows]),
            "" if gap is None else _against(gap, id(gap) in stars),
            closed,
            *(spread([r[k] for r in rows]) for k in ("nll", "ece", "accuracy", "disagreement")),
            _passes(key, epochs),
            _compute(rows[0], groups),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


_VARIED = ("sigmanens", "sigmanens_lambda0", "fixed_masks")


def _value(gap: Difference | float | None) -> float:
    return gap.value if isinstance(gap, Difference) else gap or 0.0


def _mean(groups: Mapping[tuple[Any, ...], Mapping[int, Row]], method: str) -> float | None:
    found = [by for key, by in groups.items() if key[0] == method and not key[3]]
    if not found:
        return None
    return mean(r["nll_calibrated"] for r in found[0].values())


def _compute(row: Row, groups: Mapping[tuple[Any, ...], Mapping[int, Row]]) -> str:
    """Multiply-adds of a prediction over those of one network."""
    one = groups.get(("single", 1, None, ""))
    counts = row.get("multiply_adds"), None if one is None else one[min(one)].get("multiply_adds")
    return f"{counts[0] / counts[1]:.2f} ×" if all(counts) else ""


def _against(gap: Difference | float, star: bool) -> str:
    if isinstance(gap, float):
        return f"{gap:+.3f}, one seed".replace("-", "−")
    said = {-1: " **better**", 1: " **worse**", 0: ""}[gap.sign]
    return f"{named(gap)}{said}{'†' if star else ''}"


def _epochs(metrics: Mapping[str, Any], config: Mapping[str, Any]) -> dict[tuple[Any, ...], int]:
    """Passes over the training pictures, all members together, of each setting."""
    found: dict[tuple[Any, ...], int] = {}
    shared = {
        name: (variant.get("change") or {}).get("recipe.member_batches") == "share"
        for name, variant in (config.get("variants") or {}).items()
    }
    for history in metrics.get("histories") or []:
        variant = history["variant"] or ""
        members = history["members"]
        passes = len(history["epochs"]) * (1 if shared.get(variant) else members)
        found[history["method"], members, history["tau"], variant] = passes
    return found


def _passes(key: tuple[Any, ...], epochs: Mapping[tuple[Any, ...], int]) -> str:
    """Those of a setting; separate networks are all trained like the one with a history."""
    method, members, tau, variant = key
    if method in ("single_temperature", "deep_ensemble"):
        one = epochs.get(("single", 1, tau, variant))
        return "" if one is None else str(one * members)
    return str(epochs.get(key, ""))

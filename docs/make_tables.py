"""Write docs/results/README.md, and the results in the README, from the files of the runs.

    python docs/make_tables.py            # write
    python docs/make_tables.py --check    # exit with 1 if the file is not what would be written

Each folder of docs/results holds the ``metrics.json`` of one run and, optionally, ``notes.md``,
what the run shows in words, and ``output.txt``, what it printed. Tables are never typed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from sigmanens.lab.report.naming import ORDER, label

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
COLUMNS = (
    ("accuracy", "accuracy"),
    ("NLL", "nll"),
    ("NLL (T)", "nll_calibrated"),
    ("ECE", "ece"),
    ("ECE (T)", "ece_calibrated"),
    ("disagreement", "disagreement"),
    ("Jensen gap", "jensen_gap"),
)
README_COLUMNS = COLUMNS[:4] + COLUMNS[5:6]


def main(check: bool) -> int:
    """Write the pages, or compare them."""
    pages = {RESULTS / "README.md": render(), README: readme()}
    stale = [p for p, text in pages.items() if not p.exists() or p.read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.name} is not what docs/make_tables.py writes")
        else:
            path.write_text(pages[path], encoding="utf-8")
    return 1 if check and stale else 0


def readme() -> str:
    """The README with its two results put in again."""
    text = README.read_text(encoding="utf-8")
    output = (RESULTS / "digits-demo" / "output.txt").read_text(encoding="utf-8").strip("\n")
    metrics = json.loads((RESULTS / "cifar10-resnet20" / "metrics.json").read_text("utf-8"))
    blocks = {"demo": f"```\n{output}\n```", "cifar": "\n".join(table(metrics, README_COLUMNS))}
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{block}\n{end}{rest.partition(end)[2]}"
    return text


def render() -> str:
    """The whole page."""
    parts = [
        "# Results\n",
        "Made by `python docs/make_tables.py` from the `metrics.json` in each folder. Fractions, "
        "NLL and Jensen gap in nats; (T): after temperature scaling of the averaged prediction, "
        "fitted on held-out pictures; ECE with 15 bins; ± is the standard deviation over seeds, "
        "brackets the 95 % bootstrap interval of a single run. OOD is the AUROC of 1 − max "
        "softmax, mean over the sets.\n",
    ]
    for folder in sorted(p.parent for p in RESULTS.glob("*/metrics.json")):
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        parts.append(section(folder, metrics))
    return "\n".join(parts)


def section(folder: Path, metrics: Mapping[str, Any]) -> str:
    """One run: what, by which command, where; the table; the notes."""
    data, env = metrics["data"], metrics["environment"]
    rows = metrics["rows"]
    seeds = len({r["seed"] for r in rows})
    lines = [
        f"## {folder.name}\n",
        f"{data['description']}. {data['validation']:,} validation and {data['test']:,} test "
        f"examples; {seeds} seed{'s' if seeds > 1 else ''}. {metrics['seconds'] / 60:.1f} minutes "
        f"{'of training ' if 'failures' in metrics else ''}on {env['cpu']}, torch "
        f"{env['torch']}.\n",
        f"    {metrics['command']}\n",
        *table(metrics, COLUMNS),
    ]
    for title, part in (
        ("Under corruption", corruption(metrics)),
        ("Out of distribution", ood(metrics)),
        ("Under a shift of the domain", shift(metrics)),
        ("Differences on the same examples", pairs(metrics)),
    ):
        if part:
            lines += [f"\n### {title}\n", *part]
    failed = metrics.get("failures") or {}
    if failed:
        lines.append(f"\nFailed and in no table: {', '.join(failed)}.")
    if "checkpoint_bytes" in metrics:
        lines.append(f"\nThe members on disk: {metrics['checkpoint_bytes'] / 1000:,.0f} kB.")
    paired = folder / "paired.json"
    if paired.exists():
        lines += ["", *differences(json.loads(paired.read_text(encoding="utf-8")))]
    notes = folder / "notes.md"
    if notes.exists():
        lines.append("\n" + notes.read_text(encoding="utf-8").strip())
    return "\n".join(lines) + "\n"


def table(metrics: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of a Markdown table with a row for every method."""
    lines = [
        "| method | M | τ | λ | parameters | "
        + " | ".join(title for title, _ in columns)
        + " | OOD | training s |",
        "| --- " * (7 + len(columns)) + "|",
    ]
    for group in _groups(metrics["rows"]):
        first = group[0]
        cells = [
            label_of(first) + (f", {first['variant']}" if first.get("variant") else ""),
            str(first["members"]),
            "" if first["tau"] is None else f"{first['tau']:g}",
            "" if first["weight"] is None else f"{first['weight']:g}",
            f"{first['params']:,}",
            *(_cell(group, key) for _, key in columns),
            _spread([_ood(r) for r in group]),
            _spread([r["train_seconds"] for r in group], digits=0),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def differences(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines that compare the last method with the others on the same pictures."""
    lines = [
        "Differences on the same pictures (made by `docs/make_paired.py`, 95 % bootstrap "
        "interval), below 0 where the ensemble is better:\n",
        "| σN-Ens against | NLL | NLL (T) |",
        "| --- | --- | --- |",
    ]
    for other in dict.fromkeys(p["against"] for p in pairs):
        found = {p["metric"]: p for p in pairs if p["against"] == other}
        cells = [
            f"{p['value']:+.4f} [{p['low']:+.4f}, {p['high']:+.4f}]"
            for p in (found["nll"], found["nll_calibrated"])
        ]
        lines.append(f"| {label(other, 1, None)} | {' | '.join(cells)} |")
    return lines


def corruption(metrics: Mapping[str, Any]) -> list[str]:
    """Means over the kinds of corruption at the mildest, middle and hardest severity."""
    rows = [r for r in metrics["rows"] if r.get("corruption")]
    if not rows or "failures" not in metrics:  # the demo and single trainings have their report
        return []
    kinds = sorted({k for r in rows for k in r["corruption"]})
    keys = [("accuracy", "accuracy"), ("NLL", "nll"), ("ECE", "ece"), ("ECE (T)", "ece_calibrated")]
    keys = [k for k in keys if k[1] in next(iter(rows[0]["corruption"].values()))["1"]]
    heads = [f"{name} at {s}" for s in ("1", "3", "5") for name, _ in keys]
    lines = [
        f"Mean over {len(kinds)} kinds ({', '.join(k.replace('_', ' ') for k in kinds)}); severity "
        "1, 3 and 5. (T): with the temperature of the clean validation data.\n",
        "| method | M | τ | variant | " + " | ".join(heads) + " |",
        "| --- " * (4 + len(heads)) + "|",
    ]
    for group in _groups(rows):
        cells = [
            _spread([mean(r["corruption"][k][s][key] for k in kinds) for r in group])
            for s in ("1", "3", "5")
            for _, key in keys
        ]
        lines.append(f"| {' | '.join([*_setting(group[0]), *cells])} |")
    return lines


def ood(metrics: Mapping[str, Any]) -> list[str]:
    """AUROC by score, mean over the OOD sets."""
    rows = [r for r in metrics["rows"] if r.get("ood")]
    if not rows or "failures" not in metrics:
        return []
    scores = list(dict.fromkeys(s for r in rows for found in r["ood"].values() for s in found))
    sets = list(dict.fromkeys(name for r in rows for name in r["ood"]))
    lines = [
        f"AUROC, OOD is the positive class; mean over {', '.join(sets)}. –: not measured.\n",
        "| method | M | τ | variant | " + " | ".join(s.replace("_", " ") for s in scores) + " |",
        "| --- " * (4 + len(scores)) + "|",
    ]
    for group in _groups(rows):
        cells = []
        for score in scores:
            found = [[r["ood"][n].get(score) for n in sets if n in r["ood"]] for r in group]
            cells.append(_spread([mean(v) if None not in v else None for v in found]))
        lines.append(f"| {' | '.join([*_setting(group[0]), *cells])} |")
    return lines


def shift(metrics: Mapping[str, Any]) -> list[str]:
    """The same classes from elsewhere."""
    rows = [r for r in metrics["rows"] if r.get("shift")]
    lines: list[str] = []
    keys = [("accuracy", "accuracy"), ("NLL", "nll"), ("NLL (T)", "nll_calibrated"), ("ECE", "ece")]
    for name in dict.fromkeys(n for r in rows for n in r["shift"]):
        lines += [
            f"{name}:\n",
            "| method | M | τ | variant | " + " | ".join(title for title, _ in keys) + " |",
            "| --- " * (4 + len(keys)) + "|",
        ]
        for group in _groups(rows):
            cells = [_spread([r["shift"][name][key] for r in group]) for _, key in keys]
            lines.append(f"| {' | '.join([*_setting(group[0]), *cells])} |")
    return lines


def pairs(metrics: Mapping[str, Any]) -> list[str]:
    """The chosen σN-Ens less every other method."""
    found = metrics.get("paired") or []
    choice = metrics.get("choice")
    if not found or not choice:
        return []
    settings: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for pair in found:
        key = tuple(pair[k] for k in ("against", "members", "tau", "weight", "variant"))
        settings.setdefault(key, {})[pair["metric"]] = pair
    lines = [
        f"σN-Ens τ={choice['tau']:g}, chosen by {choice['criterion']} ({choice['reason']}), less "
        "each other method: below 0 it is better. Brackets: 95 % bootstrap interval over examples, "
        "of the mean over the seeds that both have.\n",
        "| against | M | τ | variant | NLL | NLL (T) | seeds |",
        "| --- " * 7 + "|",
    ]
    for key, metric in settings.items():
        row = {"method": key[0], "members": key[1], "tau": key[2], "variant": key[4]}
        cells = [
            f"{p['value']:+.4f} [{p['low']:+.4f}, {p['high']:+.4f}]"
            for p in (metric["nll"], metric["nll_calibrated"])
        ]
        cells.append(str(metric["nll"]["seeds"]))
        lines.append(f"| {' | '.join([*_setting(row), *cells])} |")
    return lines


def _setting(row: Mapping[str, Any]) -> list[str]:
    """Cells that say which method a row is of."""
    tau = "" if row["tau"] is None else f"{row['tau']:g}"
    return [label_of(row), str(row["members"]), tau, str(row.get("variant") or "")]


def label_of(row: Mapping[str, Any]) -> str:
    """Readable name without its τ, which has a column."""
    return label(row["method"], row["members"], None)


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        variant = row.get("variant") or ""
        key = (row["method"], row["members"], row["tau"], row["weight"], variant)
        groups.setdefault(key, []).append(row)
    known = {name: i for i, name in enumerate(ORDER)}
    order = sorted(groups, key=lambda k: (known.get(k[0], len(known)), k[4], k[2] or 0.0))
    return [groups[k] for k in order]


def _cell(group: Sequence[Mapping[str, Any]], key: str) -> str:
    ends = (group[0].get("intervals") or {}).get(key)
    if len(group) == 1 and ends and group[0].get(key) is not None:
        return f"{group[0][key]:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"
    return _spread([r.get(key) for r in group])


def _spread(values: Sequence[float | None], digits: int = 3) -> str:
    found = [v for v in values if v is not None]
    if not found:
        return "–"
    middle = f"{mean(found):.{digits}f}"
    return middle if len(found) < 2 else f"{middle} ± {stdev(found):.{digits}f}"


def _ood(row: Mapping[str, Any]) -> float | None:
    sets = row.get("ood") or {}
    return mean(s["max_softmax"] for s in sets.values()) if sets else None


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))

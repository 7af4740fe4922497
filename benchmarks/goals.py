"""The goals that the project set itself, judged by what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.subjects import LATE, MEMBERS

__all__ = ["judged"]

OWN = "sigmanens"
LIBRARY = ("batchensemble", "packed", "masksembles")


def judged(done: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every goal with its figure: ``{goal, bound, subject, where, value, met, by}``.

    The value of a time is that of the fastest eager schedule of ours in float32, by which it was
    reached, over the reference in the same turns.
    """
    return [dict(g) for g in _goals(done.get("parts", {}))]


def _goals(parts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for subject, rows in parts.get("train", {}).items():
        for batch in _batches(rows):
            own = _fastest(rows, batch)
            yield _goal("training step ≤ M separate steps", 1.0, subject, f"B={batch}", *own)
    for subject, rows in parts.get("predict", {}).items():
        sizes = _batches(rows)
        own = _fastest(rows, 1)
        yield _goal("prediction at batch 1", 0.45, subject, "B=1", *own)
        own = _fastest(rows, sizes[-1])
        yield _goal("prediction at a large batch", 1.0, subject, f"B={sizes[-1]}", *own)
    for subject, rows in parts.get("compiled training", {}).items():
        for batch in _batches(rows):
            yield _over_eager("compiled training step", 0.85, subject, batch, rows)
    compiled, runtime = parts.get("compiled prediction", {}), parts.get("onnx", {})
    for subject, rows in compiled.items():
        yield _over_eager("compiled prediction at batch 1", 0.35, subject, 1, rows)
    for subject in [*compiled, *(s for s in runtime if s not in compiled)]:
        rows = [*compiled.get(subject, ()), *runtime.get(subject, ())]
        goal = "prediction at a large batch, compiled or in ONNX Runtime"
        yield _over_eager(goal, 0.75, subject, _batches(rows)[-1], rows)
    for subject, rows in runtime.items():
        for batch in _batches(rows):
            yield from _one_file(subject, batch, _plain(rows, batch))
    for part, what in (("train", "training step"), ("predict", "prediction")):
        for subject, rows in parts.get(part, {}).items():
            for rival in LIBRARY:
                for batch in _batches(rows):
                    yield from _against(rows, rival, batch, what, subject)
    for subject, rows in parts.get("dial", {}).items():
        for row in (r for r in rows if r["shared"] == LATE):
            bound = {"train": 1.7, "predict": 1.6}[row["what"]]
            goal = f"{row['what']}, members in the last third, over one network"
            yield _goal(goal, bound, subject, f"B={row['batch']}", row["ratio"], None)
    for subject, rows in parts.get("costs", {}).items():
        row = rows[0]
        value = row["norms"] + row["penalty"]
        where = f"B={row['batch']}: norms {row['norms']:.1%}, penalty {row['penalty']:.1%}"
        yield _goal("σNorm and penalty over plain norms", 0.03, subject, where, value, None)
    for subject, rows in parts.get("memory", {}).items():
        by = {r["contestant"]: r for r in rows}
        one, many = by["one network"], by["sigmanens sequential"]
        if one["bytes"]:
            where = f"M={many['members']}, B={many['batch']}, optimizer counted"
            ratio = many["bytes"] / one["bytes"]
            yield _goal(
                "peak memory over one network", 1.15, subject, where, ratio, "sigmanens sequential"
            )


def _one_file(subject: str, batch: int, rows: Any) -> Iterator[dict[str, Any]]:
    """Time of our ONNX file over that of M files, and its size over that of one of them."""
    by = {r["contestant"]: r for r in rows if r.get("ratio")}
    own, plain = by.get("sigmanens onnx"), by.get("separate onnx")
    if own is None or plain is None:
        return
    what, name = "prediction in ONNX Runtime over M files", own["contestant"]
    yield _goal(what, 1.05, subject, f"B={batch}", own["ratio"] / plain["ratio"], name)
    if batch == 1:
        size = MEMBERS * own["bytes"] / plain["bytes"]
        yield _goal("ONNX file over one network's", 1.3, subject, f"M={MEMBERS}", size, name)


def _against(
    rows: Any, rival: str, batch: int, what: str, subject: str
) -> Iterator[dict[str, Any]]:
    own, by = _fastest(rows, batch)
    theirs = [r for r in _plain(rows, batch) if r["contestant"] == rival and r.get("ratio")]
    if theirs and own is not None:
        where = f"B={batch}"
        yield _goal(f"{what} over {rival}'s", 1.0, subject, where, own / theirs[0]["ratio"], by)


def _over_eager(goal: str, bound: float, subject: str, batch: int, rows: Any) -> dict[str, Any]:
    """A goal over eager separate networks, judged by the fastest of ours in float32."""
    own = [
        r for r in rows
        if r["batch"] == batch and r["precision"] == "fp32" and r["contestant"].startswith(OWN)
        and r.get("ratio_to_eager")
    ]  # fmt: skip
    best: dict[str, Any] = min(own, key=lambda r: r["ratio_to_eager"], default={})
    by = best.get("contestant")
    where = f"B={batch}, over eager separate networks"
    by = f"{by}, compiled" if best.get("compiled") else by
    return _goal(goal, bound, subject, where, best.get("ratio_to_eager"), by)


def _goal(
    goal: str, bound: float, subject: str, where: str, value: float | None, by: str | None
) -> dict[str, Any]:
    met = None if value is None else value <= bound
    return {
        "goal": goal, "bound": bound, "subject": subject, "where": where, "value": value,
        "met": met, "by": by,
    }  # fmt: skip


def _plain(rows: Any, batch: int) -> list[dict[str, Any]]:
    return [
        r for r in rows if r["batch"] == batch and r["precision"] == "fp32" and not r["compiled"]
    ]


def _batches(rows: Any) -> list[int]:
    return sorted({r["batch"] for r in rows})


def _fastest(rows: Any, batch: int) -> tuple[float | None, str | None]:
    own = [r for r in _plain(rows, batch) if r["contestant"].startswith(OWN) and r.get("ratio")]
    best = min(own, key=lambda r: r["ratio"], default=None)
    return (None, None) if best is None else (best["ratio"], best["contestant"])

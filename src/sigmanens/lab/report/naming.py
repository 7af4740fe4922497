"""Names, symbols and colours of the compared methods: the same in every table and plot.

Colours follow the Okabe-Ito palette; a symbol and a line style say the same again for readers who
cannot tell the colours apart. On dark screens the page inverts the plots' lightness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ORDER", "Look", "amount", "label", "looks", "number", "short_label", "words"]

ORDER = (
    "single",
    "single_temperature",
    "single_finetuned",
    "mc_dropout",
    "laplace",
    "deep_ensemble",
    "packed",
    "batchensemble",
    "mimo",
    "masksembles",
    "lora_ensemble",
    "norm_tuning",
    "film",
    "heads_only",
    "fixed_masks",
    "sigmanens_lambda0",
    "sigmanens",
)
"""Order of the methods in tables and legends; unknown methods come before the σN-Ens rows."""

_LABELS = {
    "single": "one network",
    "single_temperature": "one network + temperature",
    "single_finetuned": "one network, fine-tuned as long",
    "mc_dropout": "MC dropout",
    "laplace": "Laplace approximation",
    "packed": "Packed-Ensembles",
    "batchensemble": "BatchEnsemble",
    "mimo": "MIMO",
    "masksembles": "Masksembles",
    "lora_ensemble": "LoRA-Ensemble",
    "norm_tuning": "norm tuning",
    "film": "FiLM-Ensemble control",
    "heads_only": "heads only (control)",
    "fixed_masks": "fixed random masks (control)",
    "sigmanens_lambda0": "σN-Ens λ=0",
}
_WORDS = {
    "knn": "k nearest neighbours",
    "mahalanobis": "Mahalanobis distance",
    "relative_mahalanobis": "relative Mahalanobis distance",
    "vim": "ViM",
    "svhn": "SVHN",
    "jpeg_compression": "JPEG compression",
}
_SHORT = {
    "single": "one net",
    "single_temperature": "one net + T",
    "single_finetuned": "one net tuned",
    "film": "FiLM",
    "heads_only": "heads only",
    "fixed_masks": "fixed masks",
    "sigmanens_lambda0": "λ=0",
}


@dataclass(frozen=True)
class Look:
    """How one method is drawn: colour, marker symbol, line style."""

    colour: str
    symbol: str
    dash: str


_LOOKS = {
    "single": Look("#c2500a", "square", "solid"),
    "single_temperature": Look("#c2500a", "square-open", "dot"),
    "single_finetuned": Look("#8f1d40", "star", "dash"),
    "deep_ensemble": Look("#0069a8", "diamond", "solid"),
    "film": Look("#b3578f", "triangle-up", "dash"),
    "sigmanens_lambda0": Look("#4b5563", "x", "dot"),
    "heads_only": Look("#8a6d00", "triangle-down", "dash"),
    "fixed_masks": Look("#6a3fb5", "pentagon", "dash"),
}
_OTHERS = (
    Look("#7a4a2b", "cross", "dashdot"),
    Look("#a87400", "hexagon", "dashdot"),
    Look("#96281b", "star", "dashdot"),
    Look("#6b7a1f", "bowtie", "dashdot"),
    Look("#8a1f4b", "star-diamond", "dashdot"),
    Look("#59606b", "octagon", "dashdot"),
    Look("#2f7fae", "hourglass", "dashdot"),
    Look("#33737d", "triangle-left", "dashdot"),
    Look("#74559c", "triangle-right", "dashdot"),
)
"""Looks of the rivals, in turn; a method keeps its look whatever its number of members."""
_SIGMA = ("#43b892", "#00594a")
"""Colours of the smallest and the largest τ."""


def amount(value: float | int | None) -> str:
    """A setting as people write it: 0.5, 2, 1e-4; "" for None."""
    return "" if value is None else f"{value:g}"


def number(value: float | None, digits: int = 3) -> str:
    """A measured number with a fixed number of decimals, "–" where there is none."""
    if value is None:
        return "–"
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def words(name: str) -> str:
    """An identifier as words: ``gaussian_noise`` becomes "gaussian noise"."""
    return _WORDS.get(name) or name.replace("_", " ").strip() or "unnamed"


def label(method: str, members: int | None, tau: float | None) -> str:
    """The name of a method in tables and sentences."""
    if method == "sigmanens":
        return "σN-Ens" if tau is None else f"σN-Ens τ={amount(tau)}"
    if method == "deep_ensemble":
        return f"{members} separate networks" if members else "separate networks"
    return _LABELS.get(method, words(method))


def short_label(method: str, members: int | None, tau: float | None) -> str:
    """The name of a method beside a point of a plot."""
    if method == "sigmanens":
        return "σN-Ens" if tau is None else f"τ={amount(tau)}"
    if method == "deep_ensemble":
        return f"{members} nets" if members else "separate nets"
    return _SHORT.get(method, label(method, members, tau))


def looks(keys: Sequence[Mapping[str, Any]]) -> list[Look]:
    """One look per method: fixed for the known ones, a ramp over τ for σN-Ens.

    ``keys`` are mappings with ``method`` and ``tau``, in display order.
    """
    ramp = sorted({key["tau"] or 0.0 for key in keys if key["method"] == "sigmanens"})
    found: list[Look] = []
    others: dict[str, Look] = {}
    for key in keys:
        if key["method"] == "sigmanens":
            place = ramp.index(key["tau"] or 0.0) / (len(ramp) - 1) if len(ramp) > 1 else 0.6
            found.append(Look(_blend(*_SIGMA, place), "circle", "solid"))
        elif key["method"] in _LOOKS:
            found.append(_LOOKS[key["method"]])
        else:
            found.append(others.setdefault(key["method"], _OTHERS[len(others) % len(_OTHERS)]))
    return found


def _blend(first: str, last: str, place: float) -> str:
    """The colour at ``place`` in [0, 1] between two ``#rrggbb`` colours."""
    pairs = [(int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * place):02x}" for a, b in pairs)

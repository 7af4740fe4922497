"""Names, symbols and colours of the compared methods: the same in every table and plot.

Colours follow the Okabe-Ito palette; a symbol and a line style say the same again for readers who
cannot tell the colours apart. On dark screens the page inverts the plots' lightness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Look(NamedTuple):
    """How one method is drawn: colour, line style, marker symbol."""

    colour: str
    dash: str
    symbol: str = "circle"


class _Method(NamedTuple):
    """Its name in tables and sentences, that beside a point of a plot, its look."""

    label: str
    short: str = ""
    look: Look | None = None


_METHODS = {
    "single": _Method("one network", "one net", Look("#c2500a", "solid", "square")),
    "single_temperature": _Method(
        "one network + temperature", "one net + T", Look("#c2500a", "dot", "square-open")
    ),
    "single_finetuned": _Method(
        "one network, fine-tuned as long", "one net tuned", Look("#8f1d40", "dash", "star")
    ),
    "mc_dropout": _Method("MC dropout"),
    "laplace": _Method("Laplace approximation"),
    "deep_ensemble": _Method("separate networks", "nets", Look("#0069a8", "solid", "diamond")),
    "packed": _Method("Packed-Ensembles"),
    "batchensemble": _Method("BatchEnsemble"),
    "mimo": _Method("MIMO"),
    "masksembles": _Method("Masksembles"),
    "lora_ensemble": _Method("LoRA-Ensemble"),
    "norm_tuning": _Method("norm tuning"),
    "film": _Method("FiLM-Ensemble control", "FiLM", Look("#b3578f", "dash", "triangle-up")),
    "heads_only": _Method(
        "heads only (control)", "heads only", Look("#8a6d00", "dash", "triangle-down")
    ),
    "fixed_masks": _Method(
        "fixed random masks (control)", "fixed masks", Look("#6a3fb5", "dash", "pentagon")
    ),
    "sigmanens_lambda0": _Method("σN-Ens λ=0", "λ=0", Look("#4b5563", "dot", "x")),
    "sigmanens": _Method("σN-Ens"),
}
ORDER = tuple(_METHODS)
"""Order of the methods in tables and legends; unknown methods come before the σN-Ens rows."""
_OTHERS = (
    Look("#7a4a2b", "dashdot", "cross"),
    Look("#a87400", "dashdot", "hexagon"),
    Look("#96281b", "dashdot", "star"),
    Look("#6b7a1f", "dashdot", "bowtie"),
    Look("#8a1f4b", "dashdot", "star-diamond"),
    Look("#59606b", "dashdot", "octagon"),
    Look("#2f7fae", "dashdot", "hourglass"),
    Look("#33737d", "dashdot", "triangle-left"),
    Look("#74559c", "dashdot", "triangle-right"),
)
"""Looks of the rivals, in turn; a method keeps its look whatever its number of members."""
_SIGMA = ("#43b892", "#00594a")
"""Colours of the smallest and the largest τ."""
_WORDS = {
    "knn": "k nearest neighbours",
    "mahalanobis": "Mahalanobis distance",
    "relative_mahalanobis": "relative Mahalanobis distance",
    "vim": "ViM",
    "svhn": "SVHN",
    "jpeg_compression": "JPEG compression",
}


class Setting(NamedTuple):
    """What the rows of a group have in common: method, M, τ, λ and variant."""

    method: str
    members: int | None = None
    tau: float | None = None
    weight: float | None = None
    variant: str = ""


def amount(value: float | int | None) -> str:
    """A setting as people write it: 0.5, 2, 1e-4; "" for None."""
    return "" if value is None else f"{value:g}"


def number(value: float | None, digits: int = 3) -> str:
    """A measured number with a fixed number of decimals, "–" where there is none."""
    if value is None:
        return "–"
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def times(multiple: float | None) -> str:
    """A multiple as "1.02 ×", "" for None."""
    return "" if multiple is None else f"{multiple:.2f} ×"


def words(name: str) -> str:
    """An identifier as words: ``gaussian_noise`` becomes "gaussian noise"."""
    return _WORDS.get(name) or name.replace("_", " ").strip() or "unnamed"


def capital(text: str) -> str:
    """The text with a capital first letter, the others as they are."""
    return text[:1].upper() + text[1:]


def label(method: str, members: int | None, tau: float | None, short: bool = False) -> str:
    """The name of a method in tables and sentences, or a short one beside a point of a plot."""
    found = _METHODS.get(method) or _Method(words(method))
    name = (short and found.short) or found.label
    if method == "sigmanens" and tau is not None:
        return f"τ={amount(tau)}" if short else f"{name} τ={amount(tau)}"
    if method == "deep_ensemble":
        return f"{members} {name}" if members else found.label
    return name


def labels(settings: Sequence[Setting], short: bool = False) -> list[str]:
    """A name for each setting; M, τ and λ where it would otherwise stand for several."""
    names = [
        label(s.method, s.members, s.tau, short) + (f", {words(s.variant)}" if s.variant else "")
        for s in settings
    ]
    found = []
    for name, setting in zip(names, settings, strict=True):
        twins = [s for other, s in zip(names, settings, strict=True) if other == name]
        parts = [name]
        for key, sign in (("members", "M"), ("tau", "τ"), ("weight", "λ")):
            if len({getattr(s, key) for s in twins}) > 1 and not (sign == "τ" and sign in name):
                parts.append(f"{sign}={amount(getattr(setting, key)) or '?'}")
        found.append(" ".join(parts))
    return found


def display_order(setting: Setting) -> tuple[Any, ...]:
    """What settings are sorted by."""
    unknown = ORDER.index("sigmanens_lambda0") - 0.5
    place = ORDER.index(setting.method) if setting.method in ORDER else unknown
    values = (setting.members or 0, setting.tau or 0.0, setting.weight or 0.0)
    return (place, setting.method, setting.variant, *values)


def looks(settings: Sequence[Setting]) -> list[Look]:
    """One look per setting: fixed for the known methods, a ramp over τ for σN-Ens."""
    ramp = sorted({s.tau or 0.0 for s in settings if s.method == "sigmanens"})
    found: list[Look] = []
    others: dict[str, Look] = {}
    for setting in settings:
        known = _METHODS.get(setting.method)
        if setting.method == "sigmanens":
            place = ramp.index(setting.tau or 0.0) / (len(ramp) - 1) if len(ramp) > 1 else 0.6
            found.append(Look(_blend(*_SIGMA, place), "solid"))
        elif known and known.look:
            found.append(known.look)
        else:
            found.append(others.setdefault(setting.method, _OTHERS[len(others) % len(_OTHERS)]))
    return found


def _blend(first: str, last: str, place: float) -> str:
    """The colour at ``place`` in [0, 1] between two ``#rrggbb`` colours."""
    pairs = [(int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * place):02x}" for a, b in pairs)

"""How each method is built and trained: one function a method, all under the study's recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sigmanens import baselines
from sigmanens.baselines import SeparateNetworks
from sigmanens.conversion.heads import find_heads, fresh_head
from sigmanens.errors import ConfigError
from sigmanens.lab.bench.settings import rival
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.rows import MemberLogits, member_logits, tempered
from sigmanens.seeding import own_seed


@dataclass(frozen=True, eq=False)
class Outcome:
    """A trained method, ready to be measured.

    Attributes:
        method: its name in ``metrics.json``.
        network: maps pictures to member logits.
        seconds: of training, all its networks together; None for one that was not trained here.
        logits: what it answers, where that is not the network's own logits.
        history: of the epochs.
        extra: further keys of its row.
        tau: of the penalty, where it is not the trial's.
        variant: likewise.
    """

    method: str
    network: nn.Module
    seconds: float | None
    logits: MemberLogits | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


Builder = Callable[[Workshop], nn.Module]


def _fixed_masks(shop: Workshop) -> nn.Module:
    """Its ``layers`` say which norms are masked; all are converted."""
    given = vars(shop.config.ensemble)
    given = {k: v for k, v in given.items() if k not in ("members", "scale", "layers", "prefix")}
    return baselines.fixed_masks(
        shop.base(), shop.members, generator=shop.generator(), **given | shop.options
    )


def _film(shop: Workshop) -> nn.Module:
    given = vars(shop.config.ensemble) | {"generator": shop.generator()} | shop.options
    options = {k: v for k, v in given.items() if k not in ("members", "scale", "shift", "prefix")}
    return baselines.film_ensemble(shop.base(), shop.members, **options)


def _rival(build: Callable[..., nn.Module]) -> Builder:
    """A rival that is built from a network, M and a source of its draws."""

    def built(shop: Workshop) -> nn.Module:
        network, options = one_network(shop)
        return build(network, shop.members, generator=shop.generator(), **options)

    return built


def _headed(build: Callable[..., nn.Module], *kind: str) -> Builder:
    """A rival that may be told where the head is, as σN-Ens is; with "head" also of which kind."""

    def built(shop: Workshop) -> nn.Module:
        given = {k: getattr(shop.config.ensemble, k) for k in ("head_name", *kind)} | shop.options
        return build(shop.base(), shop.members, generator=shop.generator(), **given)

    return built


def _lora(shop: Workshop) -> nn.Module:
    """Its heads are those of σN-Ens; fresh where σN-Ens shares one, which LoRA-Ensemble cannot."""
    ensemble = shop.config.ensemble
    head = "fresh" if ensemble.head == "shared" else ensemble.head
    given = {"head_name": ensemble.head_name, "head": head} | shop.options
    return baselines.lora_ensemble(shop.base(), shop.members, generator=shop.generator(), **given)


def _norm_tuning(shop: Workshop) -> nn.Module:
    """The head trains too where it is new: frozen it would stay at random."""
    given: dict[str, Any] = {"head_name": shop.config.ensemble.head_name}
    if not shop.config.trained_head:
        given["train_head"] = True
    given |= shop.options
    return baselines.norm_tuning(shop.base(), **given)


def _mc_dropout(shop: Workshop) -> nn.Module:
    """As many samples as the ensembles have members, unless the options say otherwise."""
    given = {
        "samples": shop.members, "seed": shop.seed(), "head_name": shop.config.ensemble.head_name,
    }  # fmt: skip
    network, options = one_network(shop)
    return baselines.mc_dropout(network, **given | options)


BUILDERS: dict[str, Builder] = {
    "sigmanens": lambda shop: shop.convert(**shop.options),
    "sigmanens_lambda0": lambda shop: shop.convert(**shop.options),
    "film": _film,
    "heads_only": _headed(baselines.heads_only, "head"),
    "fixed_masks": _fixed_masks,
    "mc_dropout": _mc_dropout,
    "batchensemble": _rival(baselines.batchensemble),
    "packed": _headed(baselines.packed),
    "masksembles": _rival(baselines.masksembles),
    "mimo": _headed(baselines.mimo),
    "lora_ensemble": _lora,
    "norm_tuning": _norm_tuning,
}
"""From a workshop to the untrained network of a method."""


def builder_of(method: str) -> Builder:
    """The builder of a method's untrained network; a user's own draws from the trial's seed.

    Raises:
        ConfigError: if there is none of that name.
    """
    if method in BUILDERS:
        return BUILDERS[method]
    build = rival(method)
    if build is None:
        raise ConfigError(f"there is no method {method!r} here: {', '.join(BUILDERS)}")

    def built(shop: Workshop) -> nn.Module:
        with own_seed(shop.seed()):
            network = build(shop.base(), shop.members, shop.options)
        if not isinstance(network, nn.Module):
            raise ConfigError(f"{method} returned a {type(network).__name__}; expected a module")
        if not hasattr(network, "num_members"):
            network.num_members = shop.members  # type: ignore[assignment]
        return network

    return built


def train_method(shop: Workshop) -> Iterator[Outcome]:
    """Train the method of a trial; "separate" gives several outcomes.

    Raises:
        what building and training raise.
    """
    method = shop.trial.method
    if method == "separate":
        yield from _separate(shop)
        return
    if method == "laplace":
        yield from _laplace(shop)
        return
    network = builder_of(method)(shop)
    done = shop.fit(network, diversity=shop.diversity(), cost=shop.members)
    yield Outcome(method, network, done.seconds, history=done.history)


def with_fresh_head(
    network: nn.Module, head_name: str | Sequence[str] | None, seed: int
) -> nn.Module:
    """A network whose head is an affine norm and a Linear, as a member's under ``head="fresh"``.

    Args:
        network: changed in place.
        head_name: where its head is; None: found by itself.
        seed: of the new head's weights.

    Raises:
        HeadNotFoundError: if no head with a Linear is found.
    """
    with own_seed(seed):
        for name in find_heads(network, head_name, "fresh"):
            network.set_submodule(name, fresh_head(network.get_submodule(name), name))
    return network


def one_network(shop: Workshop, index: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """Network number ``index``, not trained here yet, and the method's options but for its head.

    The head is the backbone's; under ``head: fresh`` an affine norm and a Linear, as a member of
    σN-Ens has.

    Raises:
        HeadNotFoundError: if it is to have a fresh head, and no head with a Linear is found.
    """
    network, options = shop.base(index), shop.options
    if options.pop("head", None) == "fresh":
        with_fresh_head(network, shop.config.ensemble.head_name, shop.seed(index))
    return network, options


def _separate(shop: Workshop) -> Iterator[Outcome]:
    """M networks, each trained alone; the first also stands for itself, and with a temperature."""
    validation = shop.material.data.validation
    networks: list[nn.Module] = []
    seconds: list[float] = []
    history: list[dict[str, float]] = []
    if shop.config.pretrained and shop.options.get("head") != "fresh":  # that would be untrained
        base = SeparateNetworks([shop.base().to(shop.device)])
        yield Outcome("single", base, None)
        yield Outcome("single_temperature", base, None, tempered(member_logits(base), validation))
    for i in range(shop.members):
        network, _ = one_network(shop, i)
        done = shop.fit(SeparateNetworks([network]), index=i, name=f"network{i}")
        networks.append(network)
        seconds.append(done.seconds)
        history = history or done.history
    typical = sorted(seconds)[len(seconds) // 2]
    one = SeparateNetworks(networks[:1])
    if shop.config.pretrained:
        yield Outcome("single_finetuned", one, typical, history=history)
    else:
        yield Outcome("single", one, typical, history=history)
        logits = tempered(member_logits(one), validation)
        yield Outcome("single_temperature", one, typical, logits)
    for count in sorted({*(shop.config.members or []), shop.members} - {1}):
        if count <= shop.members:
            yield Outcome("deep_ensemble", SeparateNetworks(networks[:count]), typical * count)


def _laplace(shop: Workshop) -> Iterator[Outcome]:
    """One network, then the posterior of its last layer around it."""
    network, options = one_network(shop)
    seconds = None
    if not shop.config.pretrained:
        seconds = shop.fit(SeparateNetworks([network]), name="network0").seconds
    train = shop.material.train
    given = {"head_name": shop.config.ensemble.head_name} | options
    around = baselines.laplace(network, **given)
    around.to(shop.device).fit(train.tensor, train.labels)
    yield Outcome("laplace", around, seconds)

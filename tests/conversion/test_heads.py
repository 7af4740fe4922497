"""Where the head of a network is, and one head per member in its place."""

from __future__ import annotations

import pytest
import torch
from tests.networks import Pictures, dense, randomise
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.conversion.heads import MemberHeads, find_heads
from sigmanens.errors import HeadNotFoundError
from sigmanens.passes.context import MemberAxis


class TwoHeads(nn.Module):
    """A timm-like network whose classifier is a tuple of two heads, averaged in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)
        self.head_dist = nn.Linear(6, 3)
        self.scale = nn.Linear(3, 3)  # last with parameters, but not the head

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        return self.head, self.head_dist

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.body(x))
        return (self.head(h) + self.head_dist(h)) / 2


class OneHead(TwoHeads):
    def get_classifier(self) -> nn.Module:
        return self.head


class Headless(TwoHeads):
    def get_classifier(self) -> nn.Module:
        return nn.Identity()


class Aliased(nn.Module):
    """A head under two names, of which the second is used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 3)
        self.classifier = self.fc

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(x))


class Composite(nn.Module):
    """A head of several layers with a norm and batch statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.classifier = nn.Sequential(
            nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.0), nn.Linear(5, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(self.body(x)))


class Configured(nn.Module):
    """A transformers-like network."""

    class config:
        num_labels = 3

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.norm(x))


# -- finding -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (dense(), ["6"]),
        (Pictures(), ["fc"]),
        (TwoHeads(), ["head", "head_dist"]),
        (OneHead(), ["head"]),
        (Aliased(), ["fc", "classifier"]),
        (Composite(), ["classifier.4"]),
        (Configured(), ["score"]),
        (nn.Sequential(dense(), nn.Identity()), ["0.6"]),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else None,
)
def test_heads_are_found(network: nn.Module, expected: list[str]) -> None:
    assert find_heads(network, None, "copy") == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("resnet18", ["fc"]), ("convnext_tiny", ["classifier.2"]), ("vit_b_16", ["heads.head"])],
)
def test_torchvision_heads_are_found(name: str, expected: list[str]) -> None:
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        network = getattr(models, name)()
    assert find_heads(network, None, "copy") == expected
    assert find_heads(network, None, "fresh") == expected


@pytest.mark.parametrize(
    ("config", "model", "copied", "fresh"),
    [
        ("BertConfig", "BertForSequenceClassification", "classifier", "classifier"),
        ("RobertaConfig", "RobertaForSequenceClassification", "classifier", "classifier.out_proj"),
        ("GPT2Config", "GPT2ForSequenceClassification", "score", "score"),
    ],
)
def test_transformers_heads_are_found(config: str, model: str, copied: str, fresh: str) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        network = getattr(transformers, model)(getattr(transformers, config)())
    assert find_heads(network, None, "copy") == [copied]
    assert find_heads(network, None, "fresh") == [fresh]


@pytest.mark.parametrize(
    ("name", "expected"), [("test_vit", ["head"]), ("test_resnet", ["fc"]), ("test_convnext", None)]
)
def test_timm_heads_are_found(name: str, expected: list[str] | None) -> None:
    timm = pytest.importorskip("timm")
    network = timm.create_model(name)
    found = find_heads(network, None, "copy")
    assert found == (expected or ["head.fc"])
    assert isinstance(network.get_submodule(found[0]), nn.Linear)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), "its last Linear is '0'"),
        (nn.Sequential(nn.Conv2d(4, 3, 1), nn.GroupNorm(1, 3)), "no classification head found"),
        (nn.LayerNorm(4), "head='shared'"),
        (Headless(), "made without a classification head.*Make it with num_classes"),
    ],
    ids=["norm_last", "no_linear", "root_norm", "identity"],
)
def test_no_head_found_names_the_ways_out(network: nn.Module, message: str) -> None:
    with pytest.raises(HeadNotFoundError, match=message) as error:
        sn.convert(network, 2)
    assert "head_name" in str(error.value)
    assert "head='shared'" in str(error.value)


@pytest.mark.parametrize("name", ["classifer", "", ["6", "nothing"]])
def test_an_unknown_head_name_is_named_with_the_last_modules(name: str | list[str]) -> None:
    with pytest.raises(HeadNotFoundError, match=r"is no module of this Sequential; .* 4, 5, 6\."):
        sn.convert(dense(), 2, head_name=name)


def test_heads_within_heads_are_refused() -> None:
    with pytest.raises(HeadNotFoundError, match=r"'classifier\.4' lies within head 'classifier'"):
        sn.convert(Composite(), 2, head="copy", head_name=["classifier", "classifier.4"])


def test_fresh_heads_need_a_linear_to_take_sizes_from() -> None:
    base = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1))
    with pytest.raises(HeadNotFoundError, match="head '2' is a Conv2d without a Linear"):
        sn.convert(base, 2, head="fresh", head_name="2")


# -- running -----------------------------------------------------------------------------------


def test_rows_of_a_member_go_through_its_head() -> None:
    heads = [nn.Linear(4, 3) for _ in range(3)]
    layer = MemberHeads(heads, MemberAxis(3))
    x = torch.randn(6, 4)
    expected = torch.cat([h(r) for h, r in zip(heads, x.chunk(3), strict=True)])
    with layer.axis.running(0, 3):
        torch.testing.assert_close(layer(x), expected)
    with layer.axis.running(1, 3):
        torch.testing.assert_close(layer(x[2:]), expected[2:])
    with layer.axis.running(2, 3):
        torch.testing.assert_close(layer(x[4:]), expected[4:])
    assert "members=3" in str(layer)


def test_heads_with_several_inputs_and_results() -> None:
    class Pair(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor, *, scale: Tensor, both: Tensor) -> tuple[Tensor, dict]:
            return x * self.factor, {"y": both + self.factor, "mean": (x * scale).mean()}

    layer = MemberHeads([Pair(1.0), Pair(10.0)], MemberAxis(2))
    x, scale = torch.ones(4, 3), torch.ones(3)
    with layer.axis.running(0, 2):
        y, more = layer(x, scale=scale, both=torch.zeros(4))
    assert y[:, 0].tolist() == [1, 1, 10, 10]
    assert more["y"].tolist() == [1, 1, 10, 10]
    assert more["mean"].item() == 1


@pytest.mark.parametrize("kind", ["copy", "fresh", "shared"])
def test_kinds_of_heads(kind: str) -> None:
    base = randomise(Composite()).eval()
    name = None if kind != "copy" else "classifier"
    ens = sn.convert(base, 3, head=kind, head_name=name)
    assert ens.plan.head == kind
    x = torch.randn(5, 4)
    if kind == "shared":
        assert not ens.member_heads()
        assert ens.report.converted == ["norm", "classifier.1"]
        torch.testing.assert_close(ens(x)[1], base(x), rtol=1e-5, atol=1e-6)
        return
    (heads,) = ens.member_heads().values()
    assert len(heads.heads) == 3
    parameters = [p.data_ptr() for h in heads.heads for p in h.parameters()]
    assert len(set(parameters)) == len(parameters)
    if kind == "copy":
        assert ens.report.kept == ["classifier.1"]
        assert "inside a head" in str(ens.report)
        assert type(heads.heads[0][1]) is nn.BatchNorm1d
        torch.testing.assert_close(ens(x)[2], base(x), rtol=1e-5, atol=1e-6)
    else:
        assert [type(m) for m in heads.heads[0]] == [nn.LayerNorm, nn.Linear]
        assert heads.heads[0][1].weight.shape == (3, 5)
        assert not torch.equal(heads.heads[0][1].weight, heads.heads[1][1].weight)


def test_both_heads_of_a_tuple_become_one_per_member() -> None:
    base = TwoHeads().eval()
    ens = sn.convert(base, 3, head="copy", init="preserve")
    assert set(ens.member_heads()) == {"head", "head_dist"}
    x = torch.randn(5, 4)
    torch.testing.assert_close(ens(x)[1], base(x), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        ens.network.head_dist.heads[1].bias.add_(2.0)
    torch.testing.assert_close(ens(x)[1], base(x) + 1.0, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ens(x)[0], base(x), rtol=1e-5, atol=1e-6)


def test_a_head_with_two_names_is_replaced_under_both() -> None:
    ens = sn.convert(Aliased(), 2)
    assert ens.network.fc is ens.network.classifier
    ens(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None for p in ens.network.fc.parameters())
    single = ens.member(1)
    assert single.fc is single.classifier


def test_a_shared_head_is_trained_by_all_members() -> None:
    ens = sn.convert(dense(), 3, head="shared")
    x = torch.randn(8, 4)
    ens(x).sum().backward()
    together = ens.network[6].weight.grad.clone()
    total = torch.zeros_like(together)
    for m in range(3):
        ens.zero_grad()
        with ens.axis.choosing(start=m, stop=m + 1):
            ens(x).sum().backward()
        total += ens.network[6].weight.grad
    torch.testing.assert_close(together, total)


def test_batch_norms_in_heads_keep_statistics_per_member_and_can_be_frozen() -> None:
    ens = sn.convert(randomise(Composite()), 2, head="copy", head_name="classifier").train()
    norms = [h[1] for h in ens.network.classifier.heads]
    before = [n.running_mean.clone() for n in norms]
    with ens.axis.choosing(start=0, stop=1):
        ens(torch.randn(8, 4))
    assert not torch.equal(norms[0].running_mean, before[0])
    assert torch.equal(norms[1].running_mean, before[1])
    ens.freeze_statistics()
    frozen = [n.running_mean.clone() for n in norms]
    for _ in range(3):
        ens.train()(torch.randn(8, 4))
    assert all(torch.equal(n.running_mean, f) for n, f in zip(norms, frozen, strict=True))
    assert ens.network.classifier.heads[0][3].training  # dropout is no norm
    ens.freeze_statistics(False)
    ens(torch.randn(8, 4))
    assert not torch.equal(norms[1].running_mean, frozen[1])

"""OOD scores of features against loops, against pytorch-ood, and on planted OOD."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import OAS
from tests.oracles import feature_scores as oracle
from torch import Tensor

from sigmanens import evaluation as ev
from sigmanens.errors import InputError, NonFiniteError

NEW = {
    "mahalanobis": ev.Mahalanobis,
    "relative": ev.RelativeMahalanobis,
    "knn": lambda: ev.KNN(5),
    "vim": ev.ViM,
}
every_score = pytest.mark.parametrize("make", NEW.values(), ids=NEW)


class Drawn:
    """Features of M members in classes, a head that tells them apart, and samples elsewhere."""

    def __init__(
        self, members: int = 2, samples: int = 60, width: int = 6, classes: int = 3, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        means = 3 * draw(members, classes, width)
        mixing = draw(members, width, width)
        self.labels = torch.arange(samples) % classes
        self.train = means[:, self.labels] + draw(members, samples, width) @ mixing
        self.inside = means[:, self.labels] + draw(members, samples, width) @ mixing
        self.outside = 6 * draw(members, samples, width)
        self.weight = means.clone()
        self.bias = draw(members, classes)

    def fit(self, score: ev.FeatureScore) -> ev.FeatureScore:
        return score.fit(self.train, self.labels, (self.weight, self.bias))


def expected(kind: str, data: Drawn, samples: Tensor, own: bool = False) -> list[list[float]]:
    """The oracle's scores of each member at the settings of NEW, but for 30 % shrinkage."""
    y = data.labels.tolist()

    def of_member(train: np.ndarray, z: np.ndarray, *head: np.ndarray) -> list[float]:
        if kind == "mahalanobis":
            return oracle.mahalanobis(train, y, z, 0.3)
        if kind == "relative":
            return oracle.relative_mahalanobis(train, y, z, 0.3)
        if kind == "knn":
            return oracle.knn(train, z, 5 + own)
        return oracle.vim(train, *head, z, train.shape[1] // 2)

    tensors = (data.train, samples, data.weight, data.bias)
    return [of_member(*(t[m].numpy() for t in tensors)) for m in range(len(samples))]


@given(
    kind=st.sampled_from(list(NEW)),
    members=st.integers(1, 3),
    width=st.integers(2, 7),
    classes=st.integers(2, 4),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=30)
def test_scores_equal_loops(kind, members, width, classes, seed) -> None:
    data = Drawn(members, 20, width, classes, seed)
    score = data.fit(
        {"mahalanobis": ev.Mahalanobis(0.3), "relative": ev.RelativeMahalanobis(0.3)}.get(kind)
        or NEW[kind]()
    )
    each = expected(kind, data, data.outside)
    torch.testing.assert_close(
        score.member_scores(data.outside), torch.tensor(each, dtype=torch.float64),
        rtol=1e-7, atol=1e-7,
    )  # fmt: skip
    pooled = oracle.pooled(each, expected(kind, data, data.train, own=True))
    torch.testing.assert_close(
        score.score(data.outside), torch.tensor(pooled, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", list(NEW))
def test_scores_equal_those_of_pytorch_ood(kind: str) -> None:
    detector = pytest.importorskip("pytorch_ood.detector")
    data = Drawn(1, 300, 8, 4, seed=3)
    train, z, y = data.train[0].float(), data.outside[0].float(), data.labels
    score = {"mahalanobis": ev.Mahalanobis(0.0), "relative": ev.RelativeMahalanobis(0.0)}.get(
        kind
    ) or NEW[kind]()
    ours = score.fit(train, y, (data.weight[0], data.bias[0])).member_scores(z)[0]
    theirs: Any = {
        "mahalanobis": lambda: detector.Mahalanobis(None),
        "relative": lambda: detector.RMD(None),
        "knn": lambda: detector.KNN(None, k=5),
        "vim": lambda: detector.ViM(None, 4, data.weight[0].float(), data.bias[0].float()),
    }[kind]()
    found = theirs.fit_features(train, y).predict_features(z).double()
    # Its covariances are sums over the samples, not means, and its first score is halved.
    factor = {"mahalanobis": 2 * 300, "relative": 300}.get(kind, 1)
    torch.testing.assert_close(ours, factor * found, rtol=1e-3, atol=1e-3)


@pytest.mark.case("P2")
@every_score
def test_every_score_rises_on_planted_ood(make) -> None:
    # And swapping the sets gives 1 − AUROC.
    data = Drawn(3, 200, 10, 4, seed=1)
    score = data.fit(make())
    inside, outside = score.score(data.inside), score.score(data.outside)
    assert ev.auroc(inside, outside) > 0.9
    assert ev.auroc(inside, outside) == pytest.approx(1 - ev.auroc(outside, inside))
    for m in range(3):
        of_member = [score.member_scores(x)[m] for x in (data.inside, data.outside)]
        assert ev.auroc(*of_member) > 0.8


@pytest.mark.case("P4")
@every_score
def test_one_member_is_one_network(make) -> None:
    data = Drawn(1, 80, 5, 3, seed=2)
    alone = make().fit(data.train[0], data.labels, (data.weight[0], data.bias[0]))
    score = data.fit(make())
    for given_3d, given_2d in ((data.inside, data.inside[0]), (data.outside, data.outside[0])):
        torch.testing.assert_close(score.score(given_3d), alone.score(given_2d))
        torch.testing.assert_close(score.member_scores(given_3d), alone.member_scores(given_2d))
    own, pooled = score.member_scores(data.outside)[0], score.score(data.outside)
    assert torch.equal(own.argsort(), pooled.argsort())


@every_score
def test_a_member_on_another_scale_does_not_drown_the_others(make) -> None:
    data = Drawn(2, 100, 6, 3, seed=4)
    score = data.fit(make()).score(data.outside)
    loud = Drawn(2, 100, 6, 3, seed=4)
    loud.train[1] *= 100
    loud.weight[1] /= 100
    outside = data.outside.clone()
    outside[1] *= 100
    torch.testing.assert_close(loud.fit(make()).score(outside), score, rtol=1e-6, atol=1e-6)


def test_shrinkage_from_the_samples_is_that_of_scikit_learn() -> None:
    data = Drawn(1, 30, 6, 3, seed=5)
    means = oracle.class_means(data.train[0].numpy(), data.labels.tolist())
    centred = np.stack(
        [x - means[y] for x, y in zip(data.train[0].numpy(), data.labels.tolist(), strict=True)]
    )
    rho = OAS(assume_centered=True).fit(centred).shrinkage_
    assert 0.01 < rho < 0.9
    found = data.fit(ev.Mahalanobis()).member_scores(data.outside)
    torch.testing.assert_close(
        found, data.fit(ev.Mahalanobis(float(rho))).member_scores(data.outside)
    )


def test_constant_and_dependent_features_need_shrinkage() -> None:
    data = Drawn(1, 60, 5, 3, seed=6)
    dead = torch.cat([data.train, torch.zeros(1, 60, 1), data.train[..., :1]], 2)
    for score in (ev.Mahalanobis, ev.RelativeMahalanobis):
        with pytest.raises(InputError, match=r"60 training samples of width 7 is singular"):
            score(0.0).fit(dead, data.labels)
        found = score().fit(dead, data.labels)
        awake = dead.clone()
        awake[..., 5] = 5.0
        assert torch.isfinite(found.score(awake)).all()
        if score is ev.Mahalanobis:
            assert (found.score(awake) > found.score(dead)).all()
    few = Drawn(1, 6, 20, 3, seed=6)
    assert torch.isfinite(few.fit(ev.Mahalanobis()).score(few.outside)).all()


@pytest.mark.case("P7")
@every_score
def test_slices_and_types_do_not_change_the_scores(make, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Drawn(2, 70, 5, 3, seed=7)
    whole = data.fit(make()).score(data.outside)
    monkeypatch.setattr(ev.feature_score, "_SLICE_ELEMENTS", 100)
    torch.testing.assert_close(data.fit(make()).score(data.outside), whole)
    as_numpy = make().fit(
        data.train.numpy(), data.labels.int().numpy(), (data.weight.numpy(), data.bias.numpy())
    )
    assert torch.equal(as_numpy.score(data.outside.numpy()), data.fit(make()).score(data.outside))
    single = make().fit(data.train.float(), data.labels, (data.weight.float(), data.bias.float()))
    torch.testing.assert_close(single.score(data.outside.float()), whole, rtol=1e-3, atol=1e-3)
    assert single.score(data.outside.float()).dtype == torch.float64


def test_many_training_samples_are_thinned_for_the_standard_only(monkeypatch) -> None:
    data = Drawn(1, 90, 5, 3, seed=8)
    monkeypatch.setattr(ev.feature_score, "_STANDARD", 40)
    score = data.fit(ev.KNN(5))
    own = oracle.knn(data.train[0].numpy(), data.train[0, ::3].numpy(), 6)
    each = oracle.knn(data.train[0].numpy(), data.outside[0].numpy(), 5)
    assert score.score(data.outside).tolist() == pytest.approx(oracle.pooled([each], [own]))


def test_dimension_of_the_subspace_is_the_papers() -> None:
    generator = torch.Generator().manual_seed(0)
    for width, dim in ((768, 512), (10, 5)):
        train = torch.randn(width + 20, width, generator=generator)
        head = torch.randn(4, width, generator=generator), torch.zeros(4)
        default = ev.ViM().fit(train, head=head).score(train[:20])
        torch.testing.assert_close(ev.ViM(dim).fit(train, head=head).score(train[:20]), default)


@every_score
def test_bad_features_are_named(make) -> None:
    data = Drawn(2, 60, 6, 3)
    head = (data.weight, data.bias)
    with pytest.raises(InputError, match="has not been fitted"):
        make().score(data.outside)
    for features, says in (
        (data.train[0, 0], r"shape \(6,\); expected floating point \(M, N, D\)"),
        (data.train.long(), "features are torch.int64"),
        (data.train[:, :0], "not empty"),
    ):
        with pytest.raises(InputError, match=says):
            make().fit(features, data.labels, head)
    broken = data.train.clone()
    broken[0, 1, 2], broken[1, 1, 2] = math.nan, math.inf
    with pytest.raises(NonFiniteError, match="2 NaN or infinities"):
        make().fit(broken, data.labels, head)
    score = data.fit(make())
    with pytest.raises(NonFiniteError):
        score.score(broken)
    with pytest.raises(InputError, match="1 members of width 6; the score was fitted on 2 of"):
        score.score(data.outside[:1])
    with pytest.raises(InputError, match="2 members of width 5; the score was fitted on 2 of w"):
        score.score(data.outside[..., :5])


def test_what_a_score_needs_is_asked_for() -> None:
    data = Drawn(2, 60, 6, 3)
    for score in (ev.Mahalanobis(), ev.RelativeMahalanobis()):
        with pytest.raises(InputError, match="needs the labels"):
            score.fit(data.train)
        with pytest.raises(InputError, match=r"shape \(59,\); expected integers \(60,\)"):
            score.fit(data.train, data.labels[1:])
        with pytest.raises(InputError, match=r"labels are torch.float32"):
            score.fit(data.train, data.labels.float())
        alone = data.labels.clone()
        alone[7] = 9
        with pytest.raises(InputError, match="class 9 has 1 training sample"):
            score.fit(data.train, alone)
        with pytest.raises(InputError, match="constant"):
            score.fit(torch.ones(1, 60, 6), data.labels)
    for shrinkage in (-0.1, 1.1, "lw", math.nan):
        with pytest.raises(InputError, match="shrinkage is"):
            ev.Mahalanobis(shrinkage)
    with pytest.raises(InputError, match="60 training samples are too few for k=60"):
        ev.KNN(60).fit(data.train)
    with pytest.raises(InputError, match="scores all training samples of a member alike"):
        ev.KNN(3).fit(torch.ones(1, 60, 6))
    for k in (0, 2.5, True):
        with pytest.raises(InputError, match="k is"):
            ev.KNN(k)
    with pytest.raises(InputError, match="ViM needs the head"):
        ev.ViM().fit(data.train)
    with pytest.raises(InputError, match=r"expected \(2, C, 6\) and \(2, C\)"):
        ev.ViM().fit(data.train, head=(data.weight[..., 1:], data.bias))
    with pytest.raises(InputError, match="dim is 6 for 60 training samples of width 6"):
        ev.ViM(6).fit(data.train, head=(data.weight, data.bias))
    with pytest.raises(InputError, match="dim is 0"):
        ev.ViM(0)
    with pytest.raises(InputError, match="mostly negative"):
        ev.ViM().fit(data.train, head=(data.weight, data.bias - 1000))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_score
def test_cuda_and_cpu_agree(make) -> None:
    data = Drawn(2, 60, 6, 3)
    there = make().fit(
        data.train.cuda(), data.labels.cuda(), (data.weight.cuda(), data.bias.cuda())
    )
    found = there.score(data.outside.cuda())
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), data.fit(make()).score(data.outside))

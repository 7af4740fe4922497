"""The scikit-learn estimator: right, repeatable, and at home in scikit-learn's own tools."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from joblib import parallel_config
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import Tensor, nn

import sigmanens as sn
from sigmanens import evaluation
from sigmanens.errors import InputError
from sigmanens.integrations.estimator import SigmaEnsembleClassifier, default_network

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def digits() -> Arrays:
    x, y = load_digits(return_X_y=True)
    x = x + 4 * np.random.default_rng(0).standard_normal(x.shape)
    return x[:800], y[:800], x[800:1300], y[800:1300]


def small(**options: Any) -> SigmaEnsembleClassifier:
    return SigmaEnsembleClassifier(**({"members": 2, "epochs": 4, "random_state": 0} | options))


@pytest.fixture(scope="module")
def fitted(digits: Arrays) -> SigmaEnsembleClassifier:
    return small(epochs=10, members=3).fit(*digits[:2])


# -- what it predicts -----------------------------------------------------------------------------


def test_it_predicts_as_its_ensemble(fitted: SigmaEnsembleClassifier, digits: Arrays) -> None:
    x, y = digits[2:]
    pred = fitted.ensemble_.predict(torch.from_numpy(x).float())
    probs = fitted.predict_proba(x)
    np.testing.assert_allclose(probs, pred.probs.numpy(), atol=1e-6)
    assert probs.shape == (len(x), 10)
    assert (fitted.predict(x) == pred.labels.numpy()).all()
    assert fitted.score(x, y) > 0.8
    uncertainty = fitted.predict_uncertainty(x)
    for name in ("entropy", "expected_entropy", "modulation"):
        ours = getattr(uncertainty, name)
        np.testing.assert_allclose(ours, getattr(pred, name).numpy(), atol=1e-6)
    assert uncertainty.modulation.max() > 1e-3
    assert fitted.loss_curve_[-1] < fitted.loss_curve_[0]
    assert fitted.ensemble_.num_members == 3


def test_the_temperature_is_the_one_of_the_samples_held_out(digits: Arrays) -> None:
    x, y = digits[:2]
    model = small(validation_fraction=0.25).fit(x, y)
    indices = np.searchsorted(model.classes_, y)
    # The stratified fourth that the same seed holds out.
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    train, held_out = model._split(indices, seed)
    assert len(held_out) == 200
    assert not set(train) & set(held_out)
    log_probs = model.ensemble_.predict(
        torch.from_numpy(x[held_out]).float(), temperature=1.0
    ).log_probs
    expected = evaluation.fit_temperature(log_probs, torch.from_numpy(indices[held_out]))
    assert model.temperature_ == pytest.approx(expected, rel=1e-5)
    assert model.temperature_ != 1.0
    assert float(model.ensemble_.temperature) == pytest.approx(model.temperature_)
    whole = small(validation_fraction=0).fit(x, y)
    assert whole.temperature_ == 1.0


def test_samples_that_set_no_temperature_are_told() -> None:
    x = np.repeat(np.eye(2), 40, 0) + 0.01 * np.random.default_rng(0).standard_normal((80, 2))
    with pytest.warns(
        sn.SigmaNensWarning, match="the 8 samples set no temperature.*classified right"
    ):
        model = small().fit(x, np.repeat([0, 1], 40))
    assert model.temperature_ == 1.0


def test_where_no_stratified_part_can_be_held_out_there_is_no_temperature(digits: Arrays) -> None:
    for count, options in ((800, {"validation_fraction": 0.001}), (6, {})):
        y = digits[1][:count] % 2
        with pytest.warns(sn.SigmaNensWarning, match=f"no temperature is fitted.* {count} samples"):
            model = small(**options).fit(digits[0][:count], y)
        assert model.temperature_ == 1.0


def test_weights_of_zero_leave_samples_out(digits: Arrays) -> None:
    x, y, test, _ = digits
    weights = np.ones(800)
    weights[::5] = 0
    kept = weights > 0
    part = small().fit(x[kept], y[kept]).predict_proba(test)
    weighted = small().fit(x, y, sample_weight=weights).predict_proba(test)
    np.testing.assert_allclose(weighted, part, atol=1e-5)


def test_weights_of_classes_are_weights_of_their_samples_and_move_the_probabilities(
    digits: Arrays,
) -> None:
    x, y, test, _ = digits
    y = np.where(y == 3, "three", "other")
    balanced = small(class_weight="balanced").fit(x, y)
    counts = np.where(y == "three", (y == "three").sum(), (y == "other").sum())
    by_sample = small().fit(x, y, sample_weight=400 / counts)
    expected = by_sample.predict_proba(test)
    np.testing.assert_allclose(balanced.predict_proba(test), expected, atol=1e-6)
    plain = small().fit(x, y).predict_proba(test)[:, 1].mean()
    assert balanced.predict_proba(test)[:, 1].mean() > plain + 0.05
    never = small(class_weight={"three": 0.0}, validation_fraction=0).fit(x, y)
    assert never.predict_proba(test)[:, 1].mean() < plain / 2
    heavy = small(class_weight={"three": 30.0}).fit(x, y)
    assert heavy.predict_proba(test)[:, 1].mean() > plain + 0.05


def test_the_temperature_has_the_weights_too(digits: Arrays) -> None:
    x, y = digits[:2]
    weights = np.where(y < 5, 1.0, 3.0)
    model = small(validation_fraction=0.25).fit(x, y, weights)
    held_out = model._split(y, int(np.random.RandomState(0).randint(2**31 - 1)))[1]
    log_probs = model.ensemble_.predict(
        torch.from_numpy(x[held_out]).float(), temperature=1.0
    ).log_probs
    rows = np.repeat(np.arange(len(held_out)), weights[held_out].astype(int))
    expected = evaluation.fit_temperature(log_probs[rows], torch.from_numpy(y[held_out][rows]))
    assert model.temperature_ == pytest.approx(expected, rel=1e-4)


def test_several_labels_per_sample_are_refused(digits: Arrays) -> None:
    several = np.eye(10)[digits[1]]
    with pytest.raises(InputError, match=r"y has several labels per sample, shape \(800, 10\)"):
        small().fit(digits[0], several)


@pytest.mark.parametrize(
    "name", [lambda y: y.astype(str), lambda y: y - 5, lambda y: y.astype(float), lambda y: y % 2]
)
def test_labels_of_any_type(name: Callable[[np.ndarray], np.ndarray], digits: Arrays) -> None:
    y = name(digits[1])
    model = small().fit(digits[0], y)
    assert (model.classes_ == np.unique(y)).all()
    predicted = model.predict(digits[2])
    assert predicted.dtype == model.classes_.dtype
    assert (predicted == name(digits[3])).mean() > 0.5
    assert model.predict_proba(digits[2]).shape[1] == len(model.classes_)


def test_tensors_are_as_good_as_arrays(digits: Arrays) -> None:
    x, y, test, _ = digits
    arrays = small().fit(x.astype(np.float32), y)
    tensors = small().fit(torch.from_numpy(x).float(), torch.from_numpy(y))
    expected = arrays.predict_proba(test)
    np.testing.assert_array_equal(tensors.predict_proba(torch.from_numpy(test)), expected)


# -- networks -------------------------------------------------------------------------------------


def convolutions(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


def test_pictures_by_a_factory(digits: Arrays) -> None:
    x, y = digits[0].reshape(-1, 1, 8, 8), digits[1]
    model = small(network=convolutions).fit(x, y)
    assert model.n_features_in_ == 1
    assert model.predict_proba(digits[2].reshape(-1, 1, 8, 8)).shape == (500, 10)


def test_a_trained_network_is_kept_as_it_was(digits: Arrays) -> None:
    x, y = digits[:2]
    network = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    network(torch.from_numpy(x).float())  # moves the statistics: trained
    network.eval()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    model = small(network=network, convert_options={"train": "members"}).fit(x, y)
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert model.ensemble_.plan.init == "preserve"
    assert torch.equal(model.ensemble_.network[0].weight, network[0].weight)  # type: ignore[union-attr,arg-type,index,operator]


def test_the_steps_are_those_of_a_plain_loop(digits: Arrays) -> None:
    """Two steps of one batch each, written out: the network, its rates and the loss."""
    x, y = digits[0][:60], digits[1][:60]
    options = {"epochs": 2, "batch_size": 60, "lr": 0.1, "weight_decay": 0.01, "tau": 0.3}
    model = small(validation_fraction=0, diversity_weight=1e-2, **options).fit(x, y)

    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        ens = sn.convert(default_network(64, 10), 2, generator=generator).train()
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.3, weight=1e-2))
    groups = sn.param_groups(ens, lr=0.1, weight_decay=0.01)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    for factor in (1.0, 0.5):  # the cosine at steps 0 and 1 of 2
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * group["lr_mult"] * factor
        order = torch.randperm(60, generator=generator)
        optimizer.zero_grad()
        loss_fn(ens(torch.from_numpy(x).float()[order]), torch.from_numpy(y)[order], ens).backward()
        optimizer.step()
    expected = ens.predict(torch.from_numpy(digits[2]).float()).probs.numpy()
    np.testing.assert_allclose(model.predict_proba(digits[2]), expected, atol=1e-5)


# -- in scikit-learn's tools ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Skipping check check_array_api_input")
def test_the_checks_of_scikit_learn() -> None:
    """Without a temperature, for which their data sets of 20 samples are too small."""
    batches = "samples that are there twice make other batches than samples of weight 2"
    check_estimator(
        SigmaEnsembleClassifier(validation_fraction=0, epochs=20, members=2),
        expected_failed_checks={"check_sample_weight_equivalence_on_dense_data": batches},
    )


def test_the_same_seed_gives_the_same_and_leaves_torchs_alone(digits: Arrays) -> None:
    torch.manual_seed(3)
    expected_draw = torch.rand(1)
    torch.manual_seed(3)
    first = small().fit(*digits[:2]).predict_proba(digits[2])
    assert torch.rand(1) == expected_draw
    torch.manual_seed(4)
    assert (small().fit(*digits[:2]).predict_proba(digits[2]) == first).all()
    other = small(random_state=1).fit(*digits[:2]).predict_proba(digits[2])
    assert (other != first).any()


def dropping(features: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, 16),
        nn.LayerNorm(16),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(16, classes),
    )


@pytest.mark.parametrize("network", [None, dropping], ids=["default", "dropout"])
def test_fits_in_threads_are_those_of_one_thread(digits: Arrays, network: Any) -> None:
    model = small(network=network, convert_options={"head": "fresh"})
    x, y = digits[0][:200], digits[1][:200]
    torch.manual_seed(3)
    alone = cross_val_predict(model, x, y, cv=4, method="predict_proba")
    state = torch.get_rng_state()
    with parallel_config(backend="threading"):
        found = cross_val_predict(model, x, y, cv=4, method="predict_proba", n_jobs=4)
    assert (found == alone).all()
    assert torch.equal(torch.get_rng_state(), state)


def test_heads_have_the_rate_that_is_asked_for(digits: Arrays) -> None:
    x, y = digits[:2]
    options: dict[str, Any] = {"head_lr_mult": 0.0, "convert_options": {"head": "fresh"}}
    first, second = (small(epochs=n, **options).fit(x, y).ensemble_ for n in (1, 2))
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b) == (".heads." in name), name


def test_clones_pipelines_and_searches(digits: Arrays) -> None:
    x, y = digits[0][:300], digits[1][:300]
    network = convolutions(1, 10)
    copied = clone(small(network=network, tau=0.7))
    assert copied.get_params()["tau"] == 0.7
    assert copied.network is not network
    assert torch.equal(copied.network[0].weight, network[0].weight)
    pipeline = make_pipeline(StandardScaler(), small(validation_fraction=0, epochs=8))
    assert (cross_val_score(pipeline, x, y, cv=2) > 0.4).all()
    search = GridSearchCV(
        small(validation_fraction=0, epochs=1), {"members": np.arange(1, 3)}, cv=2,
        scoring="neg_log_loss",
    )  # fmt: skip
    assert search.fit(x, y).best_params_["members"] in (1, 2)


def test_it_survives_pickling(fitted: SigmaEnsembleClassifier, digits: Arrays) -> None:
    again = pickle.loads(pickle.dumps(fitted))
    assert (again.predict_proba(digits[2]) == fitted.predict_proba(digits[2])).all()


def test_a_batch_of_one_left_over_joins_the_one_before(digits: Arrays) -> None:
    model = small(batch_size=32, validation_fraction=0, epochs=1)
    model.fit(digits[0][:65], digits[1][:65])  # BatchNorm refuses a batch of one in training
    assert np.isfinite(model.loss_curve_).all()


# -- refusals -------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs is 0; expected an integer ≥ 1"),
        ({"batch_size": True}, "batch_size is True"),
        (
            {"validation_fraction": 1.0},
            r"is 1.0; expected a number in \[0, 1\)",
        ),
        ({"network": 3}, "network is a int; expected an nn.Module, a callable"),
        ({"network": Wide()}, r"logits \(64, 12\) for 10 classes in y; expected \(B, 10\)"),
        ({"members": 0}, "members is 0"),
        ({"class_weight": "even"}, "class_weight is 'even'"),
        ({"class_weight": {3: -1.0}}, r"class_weight gives factors .*-1\.0.* at least 0"),
        ({"class_weight": {3: float("nan")}}, "class_weight gives factors .*nan"),
        ({"tau": -1.0}, "tau"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, digits: Arrays) -> None:
    with pytest.raises(sn.SigmaNensError, match=message):
        small(**options).fit(*digits[:2])


def test_one_class_and_no_fit(digits: Arrays) -> None:
    with pytest.raises(sn.errors.InputError, match="one class"):
        small().fit(digits[0], np.zeros(800, int))
    with pytest.raises(NotFittedError):
        small().predict(digits[2])

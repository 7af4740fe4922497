"""Measures of members, on scales and on predictions, against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.oracles import diversity as oracle
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.diversity import measures
from sigmanens.errors import DiversityError, InputError, NonFiniteError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear1, self.bn1 = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.linear2, self.bn2 = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bn2(self.linear2(torch.relu(self.bn1(self.linear1(x)))))


def make(members: int = 3, **options: object) -> sn.SigmaEnsemble:
    """Norms 1.0.bn1, 1.0.bn2, 2 and 3; the paper's rule picks 1.0.bn2."""
    base = nn.Sequential(
        nn.Linear(4, 6),
        nn.Sequential(Block(6)),
        nn.LayerNorm(6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    )
    return sn.convert(base, members, **({"init": "normal"} | options))  # type: ignore[arg-type]


def gammas(ensemble: sn.SigmaEnsemble, *names: str) -> list[list[list[float]]]:
    norms = ensemble.sigma_norms()
    return [norms[n].scale_logit.detach().double().tolist() for n in names or norms]


# -- on scales -----------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 5])
def test_cosine_is_over_layers_and_pairs(members: int) -> None:
    ensemble = make(members)
    assert measures.cosine(ensemble) == pytest.approx(oracle.cosine(gammas(ensemble)), rel=1e-6)
    chosen = oracle.cosine(gammas(ensemble, "1.0.bn2"))
    assert measures.cosine(ensemble, "auto") == pytest.approx(chosen, rel=1e-6)
    assert measures.cosine(ensemble, ["1.0.bn2"]) == pytest.approx(chosen, rel=1e-6)


def test_cosine_of_known_scales() -> None:
    ensemble = make(2)
    for norm in ensemble.sigma_norms().values():
        with torch.no_grad():
            norm.scale_logit[0] = torch.tensor([40.0, 40, 40, -40, -40, -40])
            norm.scale_logit[1] = -norm.scale_logit[0]
    assert measures.cosine(ensemble) == pytest.approx(0, abs=1e-12)
    assert measures.owners(ensemble) == 1
    assert measures.saturation(ensemble) == 1
    with torch.no_grad():
        for norm in ensemble.sigma_norms().values():
            norm.scale_logit[1] = norm.scale_logit[0]
    assert measures.cosine(ensemble) == pytest.approx(1)
    assert measures.owners_per_channel(ensemble).tolist() == [2, 2, 2, 0, 0, 0]


def test_cosine_of_a_fresh_start() -> None:
    ensemble = sn.convert(nn.Sequential(nn.Linear(2, 4000), nn.LayerNorm(4000)), 4, head="shared")
    assert measures.cosine(ensemble) == pytest.approx(0.85, abs=0.01)


@pytest.mark.parametrize("members", [1, 2, 5])
def test_owners_and_saturation_are_of_the_regularised_norms(members: int) -> None:
    ensemble = make(members)
    with torch.no_grad():
        for norm in ensemble.sigma_norms().values():
            norm.scale_logit.mul_(4)
    layers = gammas(ensemble, "1.0.bn2")
    per_channel = measures.owners_per_channel(ensemble)
    assert per_channel.dtype == torch.int64
    assert per_channel.tolist() == oracle.owners(layers)
    assert measures.owners(ensemble) == pytest.approx(sum(oracle.owners(layers)) / 6)
    for margin in (0.02, 0.3):
        got = measures.saturation(ensemble, margin=margin)
        assert got == pytest.approx(oracle.saturation(layers, margin))
    everything = gammas(ensemble)
    assert measures.owners_per_channel(ensemble, "all").tolist() == oracle.owners(everything)
    assert measures.saturation(ensemble, "all") == pytest.approx(
        oracle.saturation(everything, 0.02)
    )


def test_a_member_at_exactly_one_half_owns_nothing() -> None:
    ensemble = make(2)
    with torch.no_grad():
        ensemble.sigma_norms()["1.0.bn2"].scale_logit.zero_()
    assert measures.owners(ensemble) == 0


def test_layers_may_be_named() -> None:
    ensemble = make()
    expected = oracle.cosine(gammas(ensemble, "2", "3"))
    assert measures.cosine(ensemble, ["2", "3"]) == pytest.approx(expected, rel=1e-6)
    assert measures.owners_per_channel(ensemble, ["2", "3"]).shape == (12,)
    with pytest.raises(InputError, match="got a Linear in the place of the ensemble"):
        measures.owners(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_carriers_do_not_enter_the_measures() -> None:
    ensemble = make(init="preserve")
    assert measures.cosine(ensemble) == pytest.approx(oracle.cosine(gammas(ensemble)), rel=1e-6)
    scales = ensemble.sigma_norms()["2"].scales()
    torch.testing.assert_close(scales, torch.ones(3, 6))  # equal functions, different γ
    assert measures.cosine(ensemble) < 0.99


def test_one_member_has_no_cosine() -> None:
    assert math.isnan(measures.cosine(make(1)))
    assert not measures.symmetric(make(1))


def test_linear_scales_have_a_cosine_but_no_owners() -> None:
    ensemble = make(scale="linear")
    assert -1 <= measures.cosine(ensemble) <= 1
    assert math.isnan(measures.owners(ensemble))
    assert math.isnan(measures.saturation(ensemble))
    with pytest.raises(DiversityError, match="owners are defined for sigmoid scales"):
        measures.owners_per_channel(ensemble)


def test_half_precision_scales_measure_the_same() -> None:
    ensemble = make()
    expected = measures.cosine(ensemble), measures.owners(ensemble)
    ensemble.half()
    assert (measures.cosine(ensemble), measures.owners(ensemble)) == expected


def test_measures_leave_no_graph_and_need_none() -> None:
    ensemble = make()
    assert not measures.owners_per_channel(ensemble).requires_grad
    with torch.inference_mode():
        assert measures.cosine(ensemble) == measures.cosine(ensemble)


@pytest.mark.parametrize(
    "part", ["scale of one member", "shift of one member", "head of one member", "nothing"]
)
def test_symmetric_needs_equal_scales_shifts_and_heads(part: str) -> None:
    ensemble = make(init="paper", head="copy", shift=True)
    assert measures.symmetric(ensemble)
    norm = ensemble.sigma_norms()["3"]
    with torch.no_grad():
        if part.startswith("scale"):
            norm.scale_logit[2, 0] += 1e-6
        elif part.startswith("shift"):
            assert isinstance(norm.shift, nn.Parameter)
            norm.shift[1, 0] += 1e-6
        elif part.startswith("head"):
            (heads,) = ensemble.member_heads().values()
            next(heads.heads[2].parameters()).view(-1)[0] += 1e-6
    assert measures.symmetric(ensemble) == (part == "nothing")


def test_a_shared_head_does_not_part_members() -> None:
    assert measures.symmetric(make(init="paper", head="shared"))
    assert not measures.symmetric(make(init="preserve", head="shared"))
    assert not measures.symmetric(make(init="paper", head="fresh"))


# -- on predictions ------------------------------------------------------------------------------

logits = arrays(
    np.float64,
    st.tuples(st.integers(2, 4), st.integers(1, 5), st.integers(2, 4)),
    elements=st.floats(-8, 8, allow_subnormal=False),
)


@given(logits, st.randoms(use_true_random=False))
def test_predictions_against_loops(z: np.ndarray, random: object) -> None:
    tensor, lists = torch.from_numpy(z), z.tolist()
    labels = [random.randrange(z.shape[2]) for _ in range(z.shape[1])]  # type: ignore[attr-defined]
    assert measures.disagreement(tensor) == pytest.approx(oracle.disagreement(lists), abs=1e-12)
    assert measures.pairwise_kl(tensor) == pytest.approx(oracle.pairwise_kl(lists), abs=1e-12)
    got = measures.jensen_gap(tensor, torch.tensor(labels))
    assert got == pytest.approx(max(oracle.jensen_gap(lists, labels), 0), abs=1e-12)
    assert min(got, measures.pairwise_kl(tensor), measures.disagreement(tensor)) >= 0


def test_logits_and_log_probabilities_measure_the_same() -> None:
    z, y = torch.randn(3, 7, 4) * 3, torch.randint(4, (7,))
    log_p = torch.log_softmax(z, 2)
    assert measures.pairwise_kl(z) == pytest.approx(measures.pairwise_kl(log_p), rel=1e-5)
    assert measures.jensen_gap(z, y) == pytest.approx(measures.jensen_gap(log_p, y), rel=1e-5)
    assert measures.disagreement(z) == measures.disagreement(log_p)


def test_pictures_of_predictions_count_every_pixel() -> None:
    z, y = torch.randn(3, 2, 4, 5, 6), torch.randint(4, (2, 5, 6))
    rows = z.movedim(2, -1).reshape(3, -1, 4)
    assert measures.disagreement(z) == pytest.approx(measures.disagreement(rows))
    assert measures.pairwise_kl(z) == pytest.approx(measures.pairwise_kl(rows))
    assert measures.jensen_gap(z, y) == pytest.approx(measures.jensen_gap(rows, y.flatten()))


def test_slices_of_samples_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = torch.randn(3, 11, 4), torch.randint(4, (11,))
    whole = measures.disagreement(z), measures.pairwise_kl(z), measures.jensen_gap(z, y)
    for size in (1, 3 * 4 * 2, 3 * 4 * 5):
        monkeypatch.setattr(measures, "SLICE_ELEMENTS", size)
        sliced = measures.disagreement(z), measures.pairwise_kl(z), measures.jensen_gap(z, y)
        assert sliced == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("members", [1, 3])
def test_equal_members_do_not_differ(members: int) -> None:
    z, y = torch.randn(1, 6, 4).repeat(members, 1, 1) * 10, torch.randint(4, (6,))
    assert measures.disagreement(z) == 0
    assert measures.pairwise_kl(z) == pytest.approx(0, abs=1e-14)
    assert measures.jensen_gap(z, y) == pytest.approx(0, abs=1e-14)


def test_two_certain_members_that_contradict_each_other() -> None:
    z = torch.tensor([[[0.0, -torch.inf]], [[-torch.inf, 0.0]]])
    assert measures.disagreement(z) == 1
    assert measures.pairwise_kl(z) == math.inf
    assert measures.jensen_gap(z, torch.tensor([0])) == math.inf


def test_classes_that_all_members_exclude_do_not_count() -> None:
    z = torch.randn(3, 5, 4)
    masked = torch.cat([z, torch.full((3, 5, 1), -torch.inf)], 2)
    assert measures.pairwise_kl(masked) == pytest.approx(measures.pairwise_kl(z))
    assert measures.jensen_gap(masked, torch.full((5,), 4)) == 0


def test_low_precision_and_graphs_are_welcome() -> None:
    z, y = torch.randn(3, 7, 4, requires_grad=True), torch.randint(4, (7,))
    exact = measures.pairwise_kl(z), measures.jensen_gap(z, y)
    for dtype in (torch.float16, torch.bfloat16):
        low = z.to(dtype)
        assert measures.pairwise_kl(low) == pytest.approx(exact[0], rel=0.05)
        assert measures.jensen_gap(low, y) == pytest.approx(exact[1], rel=0.05)


def test_the_jensen_gap_of_an_ensemble_is_what_averaging_gains() -> None:
    ensemble = make(4).eval()
    x, y = torch.randn(9, 4), torch.randint(3, (9,))
    prediction = ensemble.predict(x)
    own = nn.functional.nll_loss(prediction.member_log_probs.flatten(0, 1), y.repeat(4))
    pooled = nn.functional.nll_loss(prediction.log_probs, y)
    got = measures.jensen_gap(prediction.member_log_probs, y)
    assert got == pytest.approx(float(own - pooled), abs=1e-6)


@pytest.mark.parametrize(
    ("predictions", "described"),
    [
        (torch.zeros(3, 4), r"torch.float32 \(3, 4\)"),
        (torch.zeros(3, 0, 4), r"torch.float32 \(3, 0, 4\)"),
        (torch.zeros(0, 2, 4), r"torch.float32 \(0, 2, 4\)"),
        (torch.zeros(3, 2, 4, dtype=torch.long), r"torch.int64 \(3, 2, 4\)"),
        (np.zeros((3, 2, 4)), "a ndarray"),
        (None, "a NoneType"),
    ],
)
def test_predictions_of_the_wrong_kind_are_named(predictions: object, described: str) -> None:
    message = f"member predictions are {described}; expected a float tensor"
    for call in (
        measures.disagreement,
        measures.pairwise_kl,
        lambda p: measures.jensen_gap(p, torch.zeros(2, dtype=torch.long)),
    ):
        with pytest.raises(InputError, match=message):
            call(predictions)  # type: ignore[no-untyped-call, operator]


@pytest.mark.parametrize(
    "bad", [[math.nan, 0.0, 0.0], [math.inf, 0.0, 0.0], [-math.inf, -math.inf, -math.inf]], ids=str
)
def test_predictions_that_are_no_distribution_are_named(bad: list[float]) -> None:
    z = torch.zeros(2, 4, 3)
    z[1, 3] = torch.tensor(bad)
    for call in (
        measures.disagreement,
        measures.pairwise_kl,
        lambda p: measures.jensen_gap(p, torch.zeros(4, dtype=torch.long)),
    ):
        with pytest.raises(NonFiniteError, match="member predictions hold NaN"):
            call(z)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"torch.int64 \(3,\); expected .* shape \(2,\)"),
        (torch.zeros(2), r"labels are torch.float32 \(2,\); expected int64"),
        (torch.zeros(2, 4, dtype=torch.long), r"torch.int64 \(2, 4\); expected .* shape \(2,\)"),
        (torch.tensor([0, 4]), "labels range from 0 to 4; expected 0 to 3"),
        (torch.tensor([-100, 1]), "labels range from -100 to 1; expected 0 to 3"),
        ([0, 1], "labels are a list"),
    ],
)
def test_labels_of_the_wrong_kind_are_named(labels: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        measures.jensen_gap(torch.zeros(3, 2, 4), labels)  # type: ignore[arg-type]

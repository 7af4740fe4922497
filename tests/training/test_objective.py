"""The training objective: against separate losses, for every kind of label, and its errors."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.errors import DiversityError, InputError, NonFiniteError, SigmaNensWarning
from sigmanens.training.loss import EnsembleLoss

M, B, C = 3, 8, 5


def make(members: int = M, **options: Any) -> sn.SigmaEnsemble:
    base = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, C))
    return sn.convert(base, members, **({"init": "normal"} | options))


def logits(*shape: int) -> Tensor:
    return torch.randn(*(shape or (M, B, C)), requires_grad=True)


def labels(*shape: int) -> Tensor:
    return torch.randint(C, shape or (B,))


def separate(z: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Mean of the members' cross-entropies, one member after the other."""
    return torch.stack([F.cross_entropy(member, y, **options) for member in z]).mean()


def assert_same(z: Tensor, got: Tensor, expected: Tensor) -> None:
    """Equal in value and in gradient."""
    assert got.shape == ()
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in (got, expected)]
    torch.testing.assert_close(*gradients)


# -- the task ------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [1, 2, 5])
def test_is_the_mean_of_separate_cross_entropies(members: int) -> None:
    z, y = logits(members, B, C), labels()
    assert_same(z, EnsembleLoss()(z, y), separate(z, y))


def test_is_not_the_loss_of_the_averaged_prediction() -> None:
    z, y = logits() * 5, labels()
    pooled = F.nll_loss(torch.softmax(z, 2).mean(0).log(), y)
    assert float((EnsembleLoss()(z, y) - pooled).detach()) > 0.1


@pytest.mark.case("T9")
def test_soft_labels_are_the_same_for_all_members() -> None:
    z, y = logits(), torch.softmax(torch.randn(B, C), 1)
    assert_same(z, EnsembleLoss()(z, y), separate(z, y))
    hard = labels()
    assert_same(z, EnsembleLoss()(z, F.one_hot(hard, C).float()), separate(z, hard))


@pytest.mark.case("T9")
def test_mixup_is_the_mixture_of_two_losses() -> None:
    z, a, b = logits(), labels(), labels()
    mixed = 0.3 * F.one_hot(a, C).float() + 0.7 * F.one_hot(b, C).float()
    assert_same(z, EnsembleLoss()(z, mixed), 0.3 * separate(z, a) + 0.7 * separate(z, b))


def test_ignored_samples_do_not_count() -> None:
    z, y = logits(), labels()
    for ignored in (-100, 2):
        marked = y.clone()
        marked[:3] = ignored
        keep = marked != ignored
        got = EnsembleLoss(ignore_index=ignored)(z, marked)
        assert_same(z, got, separate(z[:, keep], marked[keep]))


def test_pictures_of_logits() -> None:
    z, y = logits(M, 2, C, 4, 3), labels(2, 4, 3)
    assert_same(z, EnsembleLoss()(z, y), separate(z, y))
    soft = torch.softmax(torch.randn(2, C, 4, 3), 1)
    assert_same(z, EnsembleLoss()(z, soft), separate(z, soft))


@pytest.mark.parametrize("class_dim", [2, -1])
def test_classes_may_be_in_another_dimension(class_dim: int) -> None:
    z, y = logits(M, 2, 7, C), labels(2, 7)
    loss_fn = EnsembleLoss(class_dim=class_dim)
    assert_same(z, loss_fn(z, y), separate(z.movedim(3, 2), y))
    soft = torch.softmax(torch.randn(2, 7, C), 2)  # laid out as the logits are
    assert_same(z, loss_fn(z, soft), separate(z.movedim(3, 2), soft.movedim(2, 1)))


def test_split_labels_belong_to_one_member_each() -> None:
    z, y = logits(M, 4, C), labels(4 * M)
    got = EnsembleLoss()(z, y, split=True)
    expected = torch.stack([F.cross_entropy(z[m], y[4 * m : 4 * m + 4]) for m in range(M)]).mean()
    assert_same(z, got, expected)
    soft = torch.softmax(torch.randn(4 * M, C), 1)
    assert_same(z, EnsembleLoss()(z, soft, split=True), F.cross_entropy(z.flatten(0, 1), soft))


@pytest.mark.case("T1")
def test_split_gradients_of_a_member_depend_on_its_slice_alone() -> None:
    ensemble, loss_fn = make(head="copy"), EnsembleLoss()
    x, y = torch.randn(4 * M, 4), labels(4 * M)
    (heads,) = ensemble.member_heads().values()
    own = list(heads.heads[1].parameters())

    def gradient() -> list[Tensor]:
        ensemble.zero_grad()
        loss_fn(ensemble(x, split=True), y, split=True).backward()
        return [p.grad.clone() for p in own if p.grad is not None]

    before = gradient()
    assert len(before) == 2
    x[:4], y[:4], x[8:], y[8:] = 7.0, 0, -7.0, 1
    for a, b in zip(before, gradient(), strict=True):
        torch.testing.assert_close(a, b)
    x[5] += 1
    assert any(not torch.allclose(a, b) for a, b in zip(before, gradient(), strict=True))


@pytest.mark.parametrize(
    "loss",
    [
        functools.partial(F.cross_entropy, label_smoothing=0.1),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    ],
    ids=["partial", "module", "function"],
)
def test_own_losses(loss: Callable[..., Tensor]) -> None:
    z, y = logits(), labels()
    assert_same(z, EnsembleLoss(loss)(z, y), separate(z, y, label_smoothing=0.1))


def test_class_weights() -> None:
    z, y, weight = logits(), labels(), torch.rand(C)
    loss_fn = EnsembleLoss(functools.partial(F.cross_entropy, weight=weight))
    assert_same(z, loss_fn(z, y), separate(z, y, weight=weight))


def test_a_loss_with_an_ignored_label_of_its_own() -> None:
    z, y = logits(), labels()
    y[:2] = 4
    keep = y != 4
    for loss in (
        nn.CrossEntropyLoss(ignore_index=4),
        functools.partial(F.cross_entropy, ignore_index=4),
    ):
        assert_same(z, EnsembleLoss(loss, ignore_index=4)(z, y), separate(z[:, keep], y[keep]))
        with pytest.raises(InputError, match="ignore_index=4, EnsembleLoss -100; give both"):
            EnsembleLoss(loss)


def test_losses_other_than_cross_entropy_get_their_own_kind_of_target() -> None:
    z, y = logits(), torch.rand(B, C)
    loss_fn = EnsembleLoss(F.binary_cross_entropy_with_logits)
    with pytest.warns(SigmaNensWarning, match=r"multilabel task, but no ensemble was given"):
        got = loss_fn(z, y)
    assert torch.equal(loss_fn(z, y), got)  # told once
    expected = torch.stack([F.binary_cross_entropy_with_logits(m, y) for m in z]).mean()
    assert_same(z, got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    z, y = torch.randn(M, B, C), labels()
    got = EnsembleLoss()(z.to(dtype), y)
    assert float(got) == pytest.approx(float(separate(z, y)), rel=2e-2)


# -- the penalty ---------------------------------------------------------------------------------


def test_the_penalty_is_added_and_reported_apart() -> None:
    ensemble, x, y = make(), torch.randn(B, 4), labels()
    diversity = sn.Diversity(0.1, 0.5)
    loss_fn = EnsembleLoss(diversity=diversity)
    assert loss_fn.task_loss is None
    assert loss_fn.penalty_loss is None
    z = ensemble(x)
    total = loss_fn(z, y, ensemble)
    assert loss_fn.task_loss is not None
    assert loss_fn.penalty_loss is not None
    torch.testing.assert_close(loss_fn.task_loss, separate(z, y).detach())
    torch.testing.assert_close(loss_fn.penalty_loss, diversity(ensemble).detach())
    torch.testing.assert_close(total.detach(), loss_fn.task_loss + loss_fn.penalty_loss)
    assert not loss_fn.task_loss.requires_grad
    assert not loss_fn.penalty_loss.requires_grad


def test_the_penalty_reaches_the_scales() -> None:
    ensemble, x, y = make(), torch.randn(B, 4), labels()
    gamma = next(iter(ensemble.sigma_norms().values())).scale_logit
    diversity = sn.Diversity(0.1, 0.5)
    with_penalty = EnsembleLoss(diversity=diversity)(ensemble(x), y, ensemble)
    parts = [with_penalty, EnsembleLoss()(ensemble(x), y), diversity(ensemble)]
    total, task, penalty = (torch.autograd.grad(loss, gamma)[0] for loss in parts)
    torch.testing.assert_close(total, task + penalty)


@pytest.mark.parametrize("diversity", [None, sn.Diversity(weight=0.0)], ids=str)
@pytest.mark.parametrize("options", [{"members": 1}, {"scale": "linear"}, {}], ids=str)
def test_without_weight_there_is_no_penalty(
    diversity: sn.Diversity | None, options: dict[str, Any]
) -> None:
    ensemble, x, y = make(**options), torch.randn(B, 4), labels()
    loss_fn = EnsembleLoss(diversity=diversity)
    expected = separate(ensemble(x), y)
    for given in ((ensemble,), ()):
        torch.testing.assert_close(loss_fn(ensemble(x), y, *given), expected)
        assert loss_fn.penalty_loss is None


def test_one_member_with_a_penalty_is_refused() -> None:
    ensemble = make(1)
    with pytest.raises(DiversityError, match="one member"):
        EnsembleLoss(diversity=sn.Diversity())(ensemble(torch.randn(B, 4)), labels(), ensemble)


def test_linear_scales_with_a_penalty_are_refused() -> None:
    ensemble = make(scale="linear")
    with pytest.raises(DiversityError, match="scale='linear'"):
        EnsembleLoss(diversity=sn.Diversity())(ensemble(torch.randn(B, 4)), labels(), ensemble)


def test_a_penalty_needs_its_ensemble() -> None:
    with pytest.raises(InputError, match=r"needs the ensemble: loss_fn\(logits, y, ensemble\)"):
        EnsembleLoss(diversity=sn.Diversity())(logits(), labels())


def test_member_by_member_is_the_same_objective() -> None:
    x, y = torch.randn(B, 4), labels()
    loss_fn = EnsembleLoss(diversity=sn.Diversity(0.2, 0.3))
    ensemble = make()
    total = loss_fn(ensemble(x), y, ensemble)
    total.backward()
    parts = loss_fn.task_loss, loss_fn.penalty_loss
    expected = {n: p.grad.clone() for n, p in ensemble.named_parameters() if p.grad is not None}
    ensemble.zero_grad()
    again = ensemble.backward(x, y, loss_fn)
    torch.testing.assert_close(again, total.detach())
    torch.testing.assert_close((loss_fn.task_loss, loss_fn.penalty_loss), parts)
    for name, p in ensemble.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[name])


# -- bad input -----------------------------------------------------------------------------------


class Output(dict[str, Tensor]):
    """As the results of transformers are."""


@pytest.mark.parametrize(
    ("z", "described"),
    [
        (torch.zeros(B, C), r"torch.float32 \(8, 5\)"),
        (torch.zeros(M, B, C, dtype=torch.long), r"torch.int64 \(3, 8, 5\)"),
        (Output(logits=torch.zeros(M, B, C)), "a Output"),
        (None, "a NoneType"),
        ([torch.zeros(B, C)] * M, "a list"),
    ],
    ids=["no members", "integers", "model output", "None", "list"],
)
def test_logits_of_the_wrong_kind_are_named(z: Any, described: str) -> None:
    message = rf"logits are {described}; expected a float tensor \(M, B, C, …\).*pass its \.logits"
    with pytest.raises(InputError, match=message):
        EnsembleLoss()(z, labels())


def test_an_empty_batch_is_named() -> None:
    with pytest.raises(InputError, match=r"the batch is empty \(0 samples\)"):
        EnsembleLoss()(torch.zeros(M, 0, C), labels(0))


HARD = rf"expected int64 class indices \({B},\)"
BOTH = rf"{HARD} or soft labels \({B}, {C}\) for logits \({M}, {B}, {C}\)"


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (labels().int(), r"labels are torch\.int32; expected int64 class indices: y\.long\(\)"),
        (labels().to(torch.uint8), r"labels are torch\.uint8; .* y\.long\(\)"),
        (labels().bool(), r"labels are torch\.bool; .* y\.long\(\)"),
        (labels().float(), rf"torch\.float32 \(8,\); {BOTH}\. For class indices: y\.long\(\)"),
        (labels()[:, None], rf"torch\.int64 \(8, 1\); {BOTH}\. .*: y\.squeeze\(-1\)"),
        (F.one_hot(labels(), C), rf"torch\.int64 \(8, 5\); {BOTH}\. .*: y\.float\(\)"),
        (torch.rand(B, C + 1), rf"torch\.float32 \(8, 6\); {BOTH}$"),
        (labels(B, 4), rf"torch\.int64 \(8, 4\); {BOTH}$"),
        (torch.tensor(3), r"torch\.int64 \(\); expected a tensor \(B,\) or \(B, C\)"),
        ([0] * B, r"labels are a list; expected a tensor \(B,\) or \(B, C\)"),
        (torch.full((B,), C), "labels range from 5 to 5; expected 0 to 4 for the 5 classes"),
        (torch.full((B,), -1), "labels range from -1 to -1; expected 0 to 4"),
        (torch.full((B, C), -0.5), "soft labels go down to -0.5; expected probabilities ≥ 0"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_labels_of_the_wrong_kind_are_named(y: Any, message: str) -> None:
    for loss in (
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        functools.partial(F.cross_entropy, label_smoothing=0.1),
    ):
        with pytest.raises(InputError, match=message):
            EnsembleLoss(loss)(logits(), y)


@pytest.mark.parametrize(
    "repeat",
    [lambda y: torch.cat([y] * M), lambda y: y.repeat_interleave(M, 0)],
    ids=["member-major", "interleaved"],
)
def test_repeated_labels_are_refused(repeat: Callable[[Tensor], Tensor]) -> None:
    # In member-major order they would be right, in the other silently wrong: ask for neither.
    message = rf"labels have {M * B} rows; expected {B} .* never repeated .* split=True\)\)"
    for y in (labels(), torch.softmax(torch.randn(B, C), 1)):
        with pytest.raises(InputError, match=message):
            EnsembleLoss()(logits(), repeat(y))


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits])
def test_labels_of_the_wrong_kind_for_a_binary_loss_are_named(loss: Callable[..., Tensor]) -> None:
    for y in (labels(), labels().float(), F.one_hot(labels(), C), torch.rand(B, C + 1)):
        with pytest.raises(InputError, match=r"expected 0 or 1 for each label .* \(8, 5\)"):
            EnsembleLoss(loss).task(logits(), y)


def test_too_few_or_too_many_labels_are_named() -> None:
    for rows in (B - 1, B + 1):
        message = rf"labels have {rows} rows; expected 8 for logits \(3, 8, 5\)$"
        with pytest.raises(InputError, match=message):
            EnsembleLoss()(logits(), labels(rows))
    with pytest.raises(InputError, match="labels have 8 rows; expected 24 for logits"):
        EnsembleLoss()(logits(), labels(), split=True)
    with pytest.raises(InputError, match="labels have 7 rows; expected 8"):
        EnsembleLoss(F.mse_loss).task(logits(), torch.rand(7, C))


@pytest.mark.parametrize("class_dim", [0, 2, -2, -3, 7])
def test_a_class_dimension_that_is_none_is_named(class_dim: int) -> None:
    message = rf"class_dim is {class_dim}; one member's logits are \(8, 5\), whose .* 1 to 1"
    with pytest.raises(InputError, match=message):
        EnsembleLoss(class_dim=class_dim)(logits(), labels())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_named_with_their_member(value: float) -> None:
    z = torch.zeros(M, B, C)
    z[1, 2] = value
    with pytest.raises(NonFiniteError, match=r"loss is nan, .* logits in members \[1\]\. Look for"):
        EnsembleLoss()(z, labels())


def test_a_picture_with_nan_is_found_in_training() -> None:
    ensemble, x = make(), torch.randn(B, 4)
    x[3, 1] = math.nan
    with pytest.raises(NonFiniteError, match=r"members \[0, 1, 2\].*NaN in the inputs"):
        EnsembleLoss()(ensemble(x), labels())
    with pytest.raises(NonFiniteError, match=r"members \[0\].*NaN in the inputs"):
        ensemble.backward(x, labels(), EnsembleLoss())


def test_a_loss_without_any_counted_label_is_named() -> None:
    message = r"loss is nan, though all logits are finite\. .* whose labels are ignore_index=-100"
    with pytest.raises(NonFiniteError, match=message):
        EnsembleLoss()(logits(), torch.full((B,), -100))


def test_soft_labels_with_nan_are_named() -> None:
    y = torch.full((B, C), 1 / C)
    y[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"all logits are finite. Look for NaN in soft labels"):
        EnsembleLoss()(logits(), y)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        functools.partial(F.cross_entropy, reduction="sum"),
    ],
    ids=["sum", "none", "partial"],
)
def test_losses_that_are_no_mean_are_refused(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(InputError, match=r"the loss has reduction='(sum|none)'; expected 'mean'"):
        EnsembleLoss(loss)


@pytest.mark.parametrize("returned", [torch.zeros(M * B), 0.5, None], ids=str)
def test_losses_that_return_no_scalar_are_refused(returned: Any) -> None:
    with pytest.raises(
        InputError, match=r"the loss function returned .*; expected a scalar tensor"
    ):
        EnsembleLoss(lambda z, y: returned)(logits(), labels())


def test_arguments_of_the_wrong_kind_are_named() -> None:
    with pytest.raises(InputError, match=r"diversity is 0.1; expected a Diversity or None"):
        EnsembleLoss(diversity=0.1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="loss is 'cross_entropy'; expected a function"):
        EnsembleLoss("cross_entropy")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="got a Tensor in the place of the ensemble"):
        EnsembleLoss(diversity=sn.Diversity())(logits(), labels(), labels())  # type: ignore[arg-type]


# -- compilation ---------------------------------------------------------------------------------


def test_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    ensemble, x, y = make(), torch.randn(B, 4), labels()
    ensemble(x)  # the check of the first batch is made outside the graph
    loss_fn = EnsembleLoss(diversity=sn.Diversity(0.1, 0.5))
    expected = loss_fn(ensemble(x), y, ensemble)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(ensemble(x), y, ensemble)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(x, y)
    torch.testing.assert_close(got, expected)
    assert loss_fn.task_loss is not None
    assert loss_fn.penalty_loss is not None
    torch.testing.assert_close(loss_fn.task_loss + loss_fn.penalty_loss, got.detach())
    torch._dynamo.reset()


def test_a_penalty_in_the_place_of_the_loss_is_refused() -> None:
    with pytest.raises(InputError, match="EnsembleLoss\\(diversity="):
        EnsembleLoss(sn.Diversity(tau=0.5))

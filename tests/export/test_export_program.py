"""The ensemble's prediction as a torch.export program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.networks import (
    Encoder,
    Pictures,
    Recurrent,
    Words,
    Wrapped,
    apart,
    dense,
    randomise,
    snapshot,
    unchanged,
)
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.errors import ExportError, InputError, NonFiniteError, SigmaNensWarning
from sigmanens.export.program import OUTPUTS, InferenceModule


def pictures(size: int) -> Tensor:
    return torch.randn(size, 1, 8, 8)


def words(size: int) -> dict[str, Any]:
    mask = torch.ones(size, 7)
    mask[:, 5:] = torch.randint(2, (size, 2))
    return {"ids": torch.randint(11, (size, 7)), "mask": mask}


def sequences(size: int) -> tuple[Any, ...]:
    return torch.randn(size, 6, 4), (torch.randn(1, size, 5), torch.randn(1, size, 5))


class GroupNormed(nn.Sequential):
    """(B, 1, 8, 8) → (B, 3)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        )


# Base, inputs for a batch size, options of the conversion.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "batch_norm": (Pictures, pictures, {}),
    "statistics_only": (Pictures, pictures, {"layers": "bn1"}),
    "layer_norm": (lambda: Encoder(True), lambda b: torch.randn(b, 4, 8), {}),
    "group_norm": (GroupNormed, pictures, {"head": "shared"}),
    "scratch": (GroupNormed, pictures, {"init": "normal", "head": "fresh"}),
    "keywords": (Words, words, {}),
    "positions": (Words, lambda b: tuple(words(b).values()), {}),
    "unbatched": (Words, lambda b: (words(b)["ids"], torch.ones(1, 1, 7, 7)), {}),
    "states": (lambda: Recurrent(True), sequences, {"batch_dims": {"state": 1}}),
    "mapping": (lambda: Wrapped(Pictures(), "dict"), pictures, {}),
}


def trained(name: str, members: int = 3) -> sn.SigmaEnsemble:
    """Members that have parted in scales, statistics and heads; in training mode; T = 1.7."""
    make, _, options = NETWORKS[name]
    ens = apart(sn.convert(randomise(make()).eval(), members, **options))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, tensor in ens.network.state_dict().items():
            if key.endswith("running_mean") or ".heads." in key:
                tensor.add_(torch.randn(tensor.shape, generator=generator))
            elif key.endswith("running_var"):
                tensor.mul_(torch.rand(tensor.shape, generator=generator) + 0.5)
    ens.temperature.fill_(1.7)
    return ens.train()


def run(program: torch.export.ExportedProgram, inputs: Any) -> dict[str, Tensor]:
    module = program.module()
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*(inputs if isinstance(inputs, tuple) else (inputs,)))


def assert_predicts(result: dict[str, Tensor], prediction: sn.Prediction, atol: float) -> None:
    assert tuple(result) == OUTPUTS
    for name in OUTPUTS:
        expected = getattr(prediction, name)
        torch.testing.assert_close(result[name], expected, rtol=0, atol=atol)
    assert float(prediction.modulation.max()) > 1e-4 or prediction.member_probs.shape[0] == 1


@pytest.mark.case("S4")
@pytest.mark.parametrize("name", NETWORKS)
def test_the_program_predicts_for_batches_of_any_size(name: str) -> None:
    ens = trained(name)
    draw = NETWORKS[name][1]
    before = snapshot(ens)
    program = sn.export_program(ens, draw(3))
    assert unchanged(ens, before)
    assert ens.schedule == "auto"
    for size in (1, 2, 3, 9):
        inputs = draw(size)
        assert_predicts(run(program, inputs), ens.predict(inputs), 1e-5)


@pytest.mark.case("S4")
def test_statistics_are_each_members_own_and_those_of_evaluation() -> None:
    ens = trained("batch_norm")
    program = sn.export_program(ens, pictures(4))
    x = pictures(5)
    result = run(program, x)
    again = run(program, torch.cat([x, 9 * pictures(5)]))  # no batch statistics: rows stay as is
    torch.testing.assert_close(again["member_probs"][:, :5], result["member_probs"])
    for m in range(3):
        single = torch.softmax(ens.member(m).eval()(x), 1)
        torch.testing.assert_close(result["member_probs"][m], single, rtol=0, atol=1e-5)


def test_an_example_of_one_sample_gives_a_program_for_more() -> None:
    ens = trained("keywords")
    program = sn.export_program(ens, words(1))
    for size in (1, 4):
        inputs = words(size)
        assert_predicts(run(program, inputs), ens.predict(inputs), 1e-5)


def test_a_batch_as_large_as_another_dimension_is_no_special_case() -> None:
    ens = trained("keywords")
    inputs = words(7)  # 7 texts of 7 words
    expected = [ens.predict({k: v[i : i + 1] for k, v in inputs.items()}) for i in range(7)]
    result = run(sn.export_program(ens, words(2)), inputs)
    assert_predicts(result, sn.Prediction.cat(expected), 1e-5)


def test_the_first_members_alone() -> None:
    ens = trained("batch_norm")
    x = pictures(4)
    for k in (1, 2):
        result = run(sn.export_program(ens, x, members=k), x)
        assert result["member_probs"].shape == (k, 4, 10)
        assert_predicts(result, ens.predict(x, members=k), 1e-5)


def test_an_ensemble_of_one() -> None:
    ens = trained("batch_norm", members=1)
    program = sn.export_program(ens, pictures(2))
    x = pictures(5)
    result = run(program, x)
    assert_predicts(result, ens.predict(x), 1e-5)
    assert torch.equal(result["modulation"], torch.zeros(5))


def test_training_goes_on_and_leaves_the_program_alone() -> None:
    ens = trained("batch_norm")
    x, y = pictures(8), torch.randint(10, (8,))
    program = sn.export_program(ens, x)
    before = run(program, x)
    was = ens.predict(x)
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.1))
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.1, weight=1e-2))
    for _ in range(2):
        optimizer.zero_grad()
        loss_fn(ens(x), y, ens).backward()
        optimizer.step()
    ens.temperature.fill_(3.0)
    after = run(program, x)
    assert all(torch.equal(after[n], before[n]) for n in OUTPUTS)
    assert (ens.predict(x).member_probs - was.member_probs).abs().max() > 1e-2


@pytest.mark.parametrize("schedule", ["folded", "sequential", 2])
def test_every_schedule_gives_the_same_numbers(schedule: str | int) -> None:
    ens = trained("batch_norm")
    x = pictures(4)
    expected = ens.predict(x)
    ens.schedule = schedule
    program = sn.export_program(ens, pictures(2))
    assert ens.schedule == schedule
    assert_predicts(run(program, x), expected, 1e-5)


def test_a_network_that_cannot_be_folded_is_exported_one_member_at_a_time() -> None:
    base = randomise(Recurrent(False)).eval()
    ens = apart(sn.convert(base, 2, batch_dims={"x": 1}))
    x = torch.randn(6, 3, 4)
    with pytest.warns(SigmaNensWarning, match="running sequentially"):
        program = sn.export_program(ens, x)
    assert ens.schedule == "auto"  # the copy that was exported found it out
    other = torch.randn(6, 5, 4)
    ens.schedule = "sequential"
    assert_predicts(run(program, other), ens.predict(other), 1e-5)


class Tagger(nn.Module):
    """ids (B, T) → (B, T, 3), the classes last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)))


def test_classes_in_the_last_dimension() -> None:
    ens = apart(sn.convert(randomise(Tagger()).eval(), 2))
    program = sn.export_program(ens, torch.randint(11, (2, 5)), class_dim=-1)
    ids = torch.randint(11, (4, 5))
    result = run(program, ids)
    assert result["probs"].shape == (4, 3, 5)
    assert_predicts(result, ens.predict(ids, class_dim=-1), 1e-5)


def test_the_program_can_be_saved_and_loaded(tmp_path: Path) -> None:
    ens = trained("states")
    torch.export.save(sn.export_program(ens, sequences(2)), tmp_path / "ens.pt2")
    inputs = sequences(5)
    loaded = torch.export.load(tmp_path / "ens.pt2")
    assert_predicts(run(loaded, inputs), ens.predict(inputs), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_exported_as_they_predict(dtype: torch.dtype) -> None:
    ens = trained("batch_norm").to(dtype)
    program = sn.export_program(ens, pictures(2).to(dtype))
    x = pictures(5).to(dtype)
    result = run(program, x)
    wide = torch.promote_types(dtype, torch.float32)
    assert {v.dtype for v in result.values()} == {wide}
    assert_predicts(result, ens.predict(x), 1e-5 if dtype is torch.float64 else 2e-2)


def test_the_function_that_is_exported_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    ens = trained("batch_norm").eval()
    compiled = torch.compile(InferenceModule(ens, 2), fullgraph=True, backend="aot_eager")
    x = pictures(4)
    with torch.no_grad():
        assert_predicts(compiled(x), ens.predict(x, members=2), 1e-5)
    torch._dynamo.reset()


# -- what cannot be exported ---------------------------------------------------------------------


class Branching(nn.Module):
    """Asks for a value in the middle."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.head(h + 1 if h.sum() > 0 else h)


class Counting(Branching):
    """Asks for the size of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x) + (1 if x.shape[0] == 2 else 2))


def test_a_network_that_does_not_export_itself_is_told_apart() -> None:
    ens = sn.convert(Branching(nn.LayerNorm(4)), 2, schedule="sequential")
    with pytest.raises(ExportError) as caught:
        sn.export_program(ens, torch.randn(2, 4))
    text = str(caught.value)
    assert text.startswith("torch.export failed for this Branching: Could not guard on data")
    assert text.endswith("The plain Branching of member 0 fails too: the cause is not the members")
    assert caught.value.__cause__ is not None


def test_a_network_made_for_one_batch_size_is_refused() -> None:
    ens = sn.convert(Counting(nn.LayerNorm(4)), 2, schedule="sequential")
    with pytest.raises(ExportError, match=r"batch as dynamic .* plain Counting .* fails too"):
        sn.export_program(ens, torch.randn(2, 4))


def test_a_member_that_does_not_export_is_told_apart() -> None:
    ens = sn.convert(dense(False), 2)
    head = ens.network[6].heads[1]
    head.register_forward_hook(lambda module, args, out: out + 1 if out.sum() > 0 else out)
    with pytest.raises(ExportError, match=r"plain Sequential of member 0 passes: export ens\.memb"):
        sn.export_program(ens, torch.randn(2, 4))


def test_without_a_plain_form_the_error_says_so() -> None:
    norm = nn.RMSNorm(4)
    ens = sn.convert(Branching(norm), 2, init="normal", shift=True, schedule="sequential")
    with torch.no_grad():
        ens.network.norm.shift.fill_(0.5)
    with pytest.raises(ExportError, match=r"No plain Branching .* cannot carry"):
        sn.export_program(ens, torch.randn(2, 4))


@pytest.mark.parametrize(
    ("example", "members", "error", "match"),
    [
        (torch.tensor(1.0), None, InputError, "no input tensor with a batch dimension"),
        ({"input": 3}, None, InputError, "no input tensor with a batch dimension"),
        (torch.randn(0, 4), None, InputError, "empty batch"),
        (torch.randn(2, 4), 3, InputError, "members is 3; expected 1 to 2"),
        (torch.full((2, 4), float("nan")), None, NonFiniteError, "2 of 2 samples have NaN"),
    ],
)
def test_bad_arguments_are_named(
    example: Any, members: int | None, error: type[Exception], match: str
) -> None:
    ens = sn.convert(dense(), 2)
    with pytest.raises(error, match=match):
        sn.export_program(ens, example, members=members)


# -- collapse ------------------------------------------------------------------------------------


def test_collapse_of_a_trained_ensemble_is_a_plain_network_whose_cost_can_be_measured() -> None:
    from sigmanens.evaluation import metrics

    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(3, 4, generator=generator)
    y = torch.arange(90) % 3
    x = centres[y] + 0.7 * torch.randn(90, 4, generator=generator)
    base = dense()
    ens = sn.convert(base, 3, init="normal", head="fresh", generator=generator)
    optimizer = torch.optim.Adam(sn.param_groups(ens, lr=0.01))
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.1, weight=1e-2))
    for _ in range(60):
        optimizer.zero_grad()
        loss_fn(ens(x), y, ens).backward()
        optimizer.step()
    single = ens.collapse().eval()
    assert type(single) is nn.Sequential
    assert not any(type(m).__module__.startswith("sigmanens") for m in single.modules())
    together = ens.predict(x).log_probs
    with torch.no_grad():
        alone = torch.log_softmax(single(x), 1)
    assert metrics.accuracy(together, y) > 0.8
    assert metrics.accuracy(alone, y) > 1 / 3
    cost = metrics.nll(alone, y) - metrics.nll(together, y)
    assert abs(cost) > 1e-3  # it is another function

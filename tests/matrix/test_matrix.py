"""The matrix: a core of small networks in every run, all of them under ``-m matrix``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.matrix import behaviours, subject
from tests.matrix.behaviours import CHEAP, cell, compiled, run
from tests.matrix.networks import Entry, networks
from tests.matrix.subject import EXACT, Subject, answer, close, counted_norms, gap

import sigmanens as sn
from sigmanens.norms import RunningStatistics

ALL = networks()
CORE = [e for e in ALL if e.core]
REFUSED = [e for e in ALL if e.refused and (e.library == "torch" or e.name.startswith("test_"))]
BY_ID = {e.id: e for e in ALL}


def _id(entry: Entry) -> str:
    return entry.id


@pytest.fixture(autouse=True)
def _libraries(request: pytest.FixtureRequest) -> None:
    entry = request.node.callspec.params.get("entry") if hasattr(request.node, "callspec") else None
    if isinstance(entry, Entry):
        pytest.importorskip(entry.library)


@pytest.mark.parametrize("entry", CORE, ids=_id)
def test_core(entry: Entry) -> None:
    row = run(entry, CHEAP)
    if row.cells["bf16"].startswith("upstream: "):  # a processor without bf16 kernels for LSTMs
        del row.cells["bf16"]
    assert {k: v for k, v in row.cells.items() if v != "pass"} == {}
    assert not row.notes


@pytest.mark.parametrize("entry", REFUSED, ids=_id)
def test_refusal(entry: Entry) -> None:
    row = run(entry, CHEAP)
    assert row.refusal.startswith(f"{entry.refused}: ")
    assert all(v.startswith(f"refused: {entry.refused}: ") for v in row.cells.values())


@pytest.mark.matrix
@pytest.mark.parametrize("entry", ALL, ids=_id)
def test_all(entry: Entry) -> None:
    row = run(entry, CHEAP)
    assert row.faults() == {}
    assert row.refusal.partition(":")[0] == entry.refused


def test_one_network_compiles_and_is_exported() -> None:
    work = Subject(BY_ID["torch/MLP, BatchNorm1d"])
    for name, behaviour in {"compile": compiled, **behaviours.COSTLY}.items():
        assert cell(behaviour, work) == ("pass", ""), name


@pytest.mark.parametrize(("rounding", "content"), [(1.0, "pass"), (0.0, "refused: ExportError: ")])
def test_a_runtime_may_differ_by_rounding_only(
    rounding: float, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmanens.export.onnx.TOLERANCE", 0.0)  # so that any difference counts
    monkeypatch.setattr(behaviours, "_rounding", lambda ensemble, work: rounding)
    work = Subject(BY_ID["torch/MLP, BatchNorm1d"])
    assert cell(behaviours.onnx, work)[0].startswith(content)
    told = [note for note in work.notes if "float32 are wrong by 1e+00" in note]
    assert len(told) == (rounding > 0)


def test_names_are_unique() -> None:
    assert len(BY_ID) == len(ALL)


def test_there_are_as_many_networks_as_promised() -> None:
    families = {e.name.partition("_")[0] for e in ALL if e.library == "timm"}
    assert len(ALL) >= 60
    assert len(families) >= 30


# -- the matrix itself can fail -------------------------------------------------------------------


@pytest.mark.parametrize("entry", CORE, ids=_id)
def test_every_piece_of_a_norms_state_shows(entry: Entry) -> None:
    base, example, tolerance = Subject(entry).exact
    expected = answer(base, example)
    assert tolerance == EXACT
    for name, norm in list(counted_norms(base).items())[::3]:
        for key, value in norm.state_dict().items():
            if not value.is_floating_point():
                continue
            kept = value.clone()
            with torch.no_grad():
                value.mul_(1.5).add_(0.1)
            shown = gap(answer(base, example), expected)
            with torch.no_grad():
                value.copy_(kept)
            assert shown > 10 * tolerance, f"{name}.{key}"


def test_spread_refuses_outputs_that_do_not_read_the_inputs() -> None:
    with pytest.raises(AssertionError, match="hardly reads"):
        close([torch.ones(3, 2)], [torch.ones(3, 2)], 1.0, "constant")


def _first_norm(ensemble: sn.SigmaEnsemble) -> sn.norms.SigmaNorm:
    return next(iter(ensemble.sigma_norms().values()))


@torch.no_grad()
def _drops_a_shift(ensemble: sn.SigmaEnsemble, base: torch.nn.Module) -> None:
    shift = _first_norm(ensemble).shift
    assert shift is not None
    shift.zero_()


@torch.no_grad()
def _shares_the_scales(ensemble: sn.SigmaEnsemble, base: torch.nn.Module) -> None:
    for layer in ensemble.sigma_norms().values():
        layer.logit.copy_(layer.logit[:1].expand_as(layer.logit).clone())
        layer.carrier.copy_(layer.carrier[:1].expand_as(layer.carrier).clone())


def _freezes_statistics(ensemble: sn.SigmaEnsemble, base: torch.nn.Module) -> None:
    ensemble.freeze_statistics()


def _hides_a_norm(ensemble: sn.SigmaEnsemble, base: torch.nn.Module) -> None:
    del ensemble.report.norms[0]


def _cuts_a_gradient(ensemble: sn.SigmaEnsemble, base: torch.nn.Module) -> None:
    layer = _first_norm(ensemble)
    layer.logit.register_hook(lambda g: g * torch.tensor([1.0, 0, 1]).view(-1, 1))


def _changes_the_base(ensemble: sn.SigmaEnsemble, base: torch.nn.Module) -> None:
    with torch.no_grad():
        next(base.buffers()).add_(1e-3)


def _keeps_a_layer_of_ours(ensemble: sn.SigmaEnsemble, base: torch.nn.Module) -> None:
    ensemble.member = lambda index: ensemble.network  # type: ignore[method-assign]


def _shares_statistics(ensemble: sn.SigmaEnsemble, base: torch.nn.Module) -> None:
    for module in ensemble.modules():
        if isinstance(module, RunningStatistics):
            module.running_mean[1] = module.running_mean[0] + 1


FAULTS: dict[str, tuple[Callable[[sn.SigmaEnsemble, torch.nn.Module], None], str, str]] = {
    "overlooked norm": (_hides_a_norm, "convert", "not in the report"),
    "dropped shift": (_drops_a_shift, "step 0, eval", "differs by"),
    "statistics of another": (_shares_statistics, "step 0, eval", "member 1: differs by"),
    "frozen statistics": (_freezes_statistics, "step 0, train", "member 0: differs by"),
    "cut gradient": (_cuts_a_gradient, "backward", "members without a gradient"),
    "members equal": (_shares_the_scales, "3 SGD steps", "differ by"),
    "layer of ours": (_keeps_a_layer_of_ours, "member(i)", "is a class of ours"),
    "changed base": (_changes_the_base, "base untouched", "tensors changed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, behaviour, message = FAULTS[fault]
    original = subject.Subject.convert

    def convert(self: Subject, *args: object, **kwargs: object) -> sn.SigmaEnsemble:
        ensemble = original(self, *args, **kwargs)  # type: ignore[arg-type]
        plant(ensemble, self.base)
        return ensemble

    monkeypatch.setattr(subject.Subject, "convert", convert)
    entry = BY_ID["torch/MLP, BatchNorm1d"]
    content = run(entry, {k: CHEAP[k] for k in ("convert", behaviour)}).cells[behaviour]
    assert content.startswith("FAIL: ")
    assert message in content

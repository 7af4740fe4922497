"""The Lightning callback that watches the members: what it logs, and when it warns."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from tests.networks import dense
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sigmanens as sn
from sigmanens.baselines import SeparateNetworks
from sigmanens.diversity import diagnosis
from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.integrations.diversity_callback import DiversityMonitor
from sigmanens.integrations.lightning import EnsembleModule

Batch = tuple[Tensor, Tensor]


def batches(count: int, seed: int = 0) -> list[Batch]:
    """Points in four dimensions, labelled by their largest among the first three coordinates."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, 4, generator=generator)
    return [(a, a[:, :3].argmax(1)) for a in x]


class Module(L.LightningModule):
    """A user's own module, with the network under a name of the user's choice."""

    def __init__(
        self,
        network: nn.Module,
        lr: float = 0.05,
        diversity: sn.Diversity | None = None,
        scale_lr_mult: float | None = None,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"inner": network})
        self.loss_fn = sn.EnsembleLoss(diversity=diversity)
        self.lr, self.scale_lr_mult = lr, scale_lr_mult

    def forward(self, x: Tensor) -> Any:
        return self.parts["inner"](x)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        network = self.parts["inner"]
        ensemble = network if isinstance(network, sn.SigmaEnsemble) else None
        return self.loss_fn(self(batch[0]), batch[1], ensemble)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = sn.param_groups(self.parts["inner"], self.lr, scale_lr_mult=self.scale_lr_mult)
        return torch.optim.SGD(groups, momentum=0.9)


class Validated(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", 1.0, batch_size=1)


def loader(data: list[Any]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def fit(
    module: L.LightningModule,
    monitor: DiversityMonitor,
    steps: int = 24,
    validation: list[Any] | None = None,
    **options: Any,
) -> L.Trainer:
    with warnings.catch_warnings():
        # Lightning's advice on workers of data loaders, and its use of a deprecated part of torch,
        # which pytest.warns would issue again as an error.
        warnings.filterwarnings("ignore", ".*does not have many workers", category=UserWarning)
        warnings.filterwarnings("ignore", ".*LeafSpec", category=FutureWarning)
        warnings.filterwarnings("ignore", ".*but have no `val_dataloader`", category=UserWarning)
        trainer = L.Trainer(
            accelerator="cpu", callbacks=[monitor], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=min(8, steps),
            **{"max_epochs": 1} | options,
        )  # fmt: skip
        trainer.fit(module, loader(batches(steps)), loader(validation) if validation else None)
    return trainer


# -- what it logs ------------------------------------------------------------------------------


def test_measures_are_those_of_the_library(tmp_path: Path) -> None:
    ens = sn.convert(dense(), 3)
    before = sn.diversity.cosine(ens, "auto")
    monitor = DiversityMonitor(first_steps=3)
    validation = batches(2, seed=1)
    trainer = fit(Validated(ens), monitor, validation=validation)
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    log_probs = ens.predict(validation[0][0]).member_log_probs
    assert metrics["diversity/disagreement"] == pytest.approx(sn.diversity.disagreement(log_probs))
    modulation = float(ens.predict(validation[0][0]).modulation.mean())
    assert metrics["diversity/modulation"] == pytest.approx(modulation, rel=1e-4)
    gap = sn.diversity.jensen_gap(log_probs, validation[0][1])
    assert metrics["diversity/jensen_gap"] == pytest.approx(gap, rel=1e-5)
    assert metrics["diversity/cosine"] == pytest.approx(sn.diversity.cosine(ens, "auto"))
    assert metrics["diversity/owners"] == pytest.approx(sn.diversity.owners(ens))
    assert metrics["diversity/saturation"] == pytest.approx(sn.diversity.saturation(ens))
    scales = [entry for entry in monitor.history if "cosine" in entry]
    # every one of the first three steps, then as often as Lightning writes to its loggers
    assert [entry["step"] for entry in scales] == [0, 1, 2, 3, 8, 16, 24]
    assert scales[0]["cosine"] == before
    predictions = [entry["step"] for entry in monitor.history if "jensen_gap" in entry]
    assert predictions == [0, 24], "Lightning's check before training, and the epoch's end"


def test_mode_and_gradients_are_left_alone() -> None:
    ens = sn.convert(nn.Sequential(dense(), nn.Dropout(0.5)), 2, head_name="0.6")
    module = Module(ens)
    seen: list[bool] = []

    class Watched(DiversityMonitor):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            seen.append(torch.is_grad_enabled() and all(m.training for m in pl_module.modules()))

    monitor = Watched(batch=batches(1, seed=1)[0], first_steps=3)
    fit(module, monitor, steps=8, max_epochs=2)
    assert seen == [True, True]
    x, y = batches(1, seed=1)[0]
    # The measure is that of evaluation mode: without dropout.
    expected = sn.diversity.jensen_gap(ens.predict(x).member_log_probs, y)
    assert monitor.history[-1]["jensen_gap"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("given", [False, True], ids=["validation", "batch"])
def test_the_library_module_is_watched_on_a_given_batch_or_in_validation(given: bool) -> None:
    ens = sn.convert(dense(), 2)
    batch = batches(1, seed=1)[0]
    monitor = DiversityMonitor(batch=batch if given else None, first_steps=3)
    module = EnsembleModule(ens, sn.EnsembleLoss(), lr=0.05, lr_schedule="constant")
    trainer = fit(module, monitor, validation=None if given else [batch])
    assert {"diversity/cosine", "diversity/jensen_gap"} <= set(trainer.callback_metrics)


def test_mappings_with_labels_are_understood() -> None:
    class Named(Module):
        def forward(self, x: Tensor) -> Any:
            return {"logits": super().forward(x)}

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = dense()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.body(x)}

    ens = sn.convert(Network(), 2)
    x, y = batches(1)[0]
    monitor = DiversityMonitor({"x": x, "labels": y})

    class Step(Module):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return self.loss_fn(self(batch[0])["logits"], batch[1])

    fit(Step(ens), monitor, steps=3)
    assert monitor.history[-1]["jensen_gap"] > 0


def test_other_batches_need_unpacking() -> None:
    x, y = batches(1)[0]
    odd = (x, y, torch.ones(16))
    with pytest.raises(InputError, match="a batch is a tuple; expected a pair"):
        fit(Module(sn.convert(dense(), 2)), DiversityMonitor(odd), steps=3)
    monitor = DiversityMonitor(odd, unpack=lambda batch: batch[:2])
    fit(Module(sn.convert(dense(), 2)), monitor, steps=3)
    assert monitor.history[-1]["jensen_gap"] > 0


# -- rivals ------------------------------------------------------------------------------------


def test_rivals_have_measures_of_predictions_only() -> None:
    network = SeparateNetworks([dense(), dense()])
    monitor = DiversityMonitor(first_steps=3)
    trainer = fit(Validated(network), monitor, validation=batches(1, seed=1))
    logged = {k for k in trainer.callback_metrics if k.startswith("diversity/")}
    assert logged == {"diversity/disagreement", "diversity/jensen_gap", "diversity/modulation"}


def test_linear_scales_have_a_cosine_but_no_owners() -> None:
    ens = sn.convert(dense(), 2, scale="linear")
    trainer = fit(Module(ens, lr=0.01), DiversityMonitor(first_steps=3), steps=8)
    logged = {k for k in trainer.callback_metrics if k.startswith("diversity/")}
    assert logged == {"diversity/cosine"}


def test_one_member_has_nothing_to_measure() -> None:
    monitor = DiversityMonitor(first_steps=3)
    trainer = fit(Validated(sn.convert(dense(), 1)), monitor, validation=batches(1))
    assert monitor.history == []
    assert not [k for k in trainer.callback_metrics if k.startswith("diversity/")]


def test_a_module_without_members_is_refused() -> None:
    class Single(Module):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

    with pytest.raises(InputError, match=r"Single returned logits \(16, 3\)"):
        fit(Single(dense()), DiversityMonitor(batches(1)[0]))


# -- warnings ----------------------------------------------------------------------------------

STRONG = sn.Diversity(tau=0.1, weight=1.0, layers="all")


def messages(record: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in record if issubclass(w.category, SigmaNensWarning)]


def test_a_partition_frozen_in_the_first_steps_warns_once() -> None:
    monitor = DiversityMonitor(first_steps=20)
    with pytest.warns(SigmaNensWarning) as record:
        fit(Module(sn.convert(dense(), 4), diversity=STRONG), monitor)
    (said,) = [m for m in messages(list(record)) if "the scales were parted by step" in m]
    step = int(said.split("by step ")[1].split(":")[0])
    entry = next(e for e in monitor.history if e["step"] == step)
    before = [e for e in monitor.history if e["step"] < step]
    assert entry["cosine"] < 0.3
    assert entry["saturation"] > 0.5
    assert not [e for e in before if e["cosine"] < 0.3 and e["saturation"] > 0.5]


def test_a_partition_that_comes_later_is_none_of_its_business() -> None:
    monitor = DiversityMonitor(first_steps=1)
    diversity = sn.Diversity(tau=0.1, weight=0.1, layers="all")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        fit(Module(sn.convert(dense(), 4), diversity=diversity), monitor)
    assert "frozen partition" not in {f.kind for f in monitor.findings}
    assert monitor.history[-1]["cosine"] < 0.3
    assert monitor.history[-1]["saturation"] > 0.5


def test_the_warning_is_given_again_in_the_next_training() -> None:
    monitor = DiversityMonitor(first_steps=20)
    for _ in range(2):
        with pytest.warns(SigmaNensWarning) as record:
            fit(Module(sn.convert(dense(), 4), diversity=STRONG), monitor)
        assert len([m for m in messages(list(record)) if "parted by step" in m]) == 1


def same_heads(network: nn.Module) -> sn.SigmaEnsemble:
    """Preserved: members start as one model, whose scales differ all the same."""
    return sn.convert(network, 3, init="preserve")


def test_members_that_stay_one_model_warn_once() -> None:
    ens = same_heads(dense(batch_norm=False))
    assert sn.diversity.cosine(ens) < 0.95
    monitor = DiversityMonitor(first_steps=5)
    trainer_options = {"val_check_interval": 6}
    with pytest.warns(SigmaNensWarning) as record:
        fit(Validated(ens, lr=1e-6), monitor, validation=batches(1, seed=1), **trainer_options)
    (said,) = messages(list(record))
    assert said.startswith("after 6 steps the members answer as one model")
    assert "cosine of the scales 0." in said


def test_members_are_not_judged_before_the_first_steps_are_over() -> None:
    ens = same_heads(dense(batch_norm=False))
    fit(Validated(ens, lr=1e-6), DiversityMonitor(first_steps=25), validation=batches(1, seed=1))


def test_rivals_that_are_one_model_warn() -> None:
    one = dense()
    with pytest.warns(SigmaNensWarning, match="the members answer as one model") as record:
        fit(Validated(SeparateNetworks([one, one])), DiversityMonitor(), validation=batches(1))
    assert "cosine" not in messages(list(record))[0]


def test_sure_members_that_agree_on_easy_data_do_not_warn() -> None:
    """Members all right and sure of it, each in its own way: all measures are small."""
    x = torch.eye(3, 4).repeat(6, 1)
    y = torch.arange(3).repeat(6)
    torch.manual_seed(1)
    network = SeparateNetworks([dense(batch_norm=False), dense(batch_norm=False)])
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        sn.EnsembleLoss()(network(x), y).backward()
        optimizer.step()
    monitor = DiversityMonitor(batch=(x, y), first_steps=1)
    fit(Module(network, lr=1e-6), monitor, steps=3)
    assert monitor.history[-1]["disagreement"] == 0
    assert monitor.history[-1]["jensen_gap"] < 1e-3


def test_equal_scales_of_members_that_agree_warn() -> None:
    ens = sn.convert(dense(batch_norm=False), 2)
    with torch.no_grad():
        for norm in ens.sigma_norms().values():
            norm.scale_logit.fill_(0.3)
        for heads in ens.member_heads().values():
            for p, q in zip(heads.heads[0].parameters(), heads.heads[1].parameters(), strict=True):
                q.copy_(p + 1e-3)
    with pytest.warns(SigmaNensWarning, match=r"cosine of the scales 1\.000"):
        fit(Validated(ens, lr=1e-6), DiversityMonitor(), validation=batches(1))


def test_equal_scales_of_members_that_disagree_do_not_warn() -> None:
    """An ensemble of heads: alike in scales, not in what it says."""
    ens = sn.convert(dense(batch_norm=False), 2, head="fresh")
    with torch.no_grad():
        for norm in ens.sigma_norms().values():
            norm.scale_logit.fill_(0.3)
    monitor = DiversityMonitor(batches(1)[0])
    fit(Module(ens, lr=1e-6), monitor)
    assert sn.diversity.cosine(ens) > 0.99
    assert monitor.history[-1]["disagreement"] > 0.1


def test_a_penalty_that_outweighs_the_task_warns_with_the_gradients_of_the_first_steps() -> None:
    ens = sn.convert(dense(), 4)
    diversity = sn.Diversity(tau=0.5, weight=5.0, layers="all")
    monitor = DiversityMonitor(first_steps=1)
    with pytest.warns(SigmaNensWarning) as record:
        fit(Module(ens, lr=1e-9, diversity=diversity), monitor, steps=3)
    (said,) = messages(list(record))
    (finding,) = monitor.findings
    assert said == finding.message
    assert "times as hard as the task" in said
    # scales have hardly moved: the same gradients again, by hand
    x, y = batches(3)[0]
    task = sn.EnsembleLoss().task(ens.train()(x), y)
    penalty, pull = sn.diversity.pull_norms(ens, diversity, task)
    said_numbers = re.search(r"gradient norms ([\d.e+-]+) and ([\d.e+-]+) at", said)
    assert said_numbers is not None
    assert float(said_numbers[1]) == pytest.approx(penalty, rel=0.05)
    assert float(said_numbers[2]) == pytest.approx(pull, rel=0.05)


def test_a_light_penalty_does_not_outweigh_the_task_and_a_delayed_one_is_judged_when_it_acts() -> (
    None
):
    light = sn.Diversity(tau=0.5, weight=1e-6, layers="all")
    fit(Module(sn.convert(dense(), 4), diversity=light), DiversityMonitor(first_steps=2), steps=4)
    for weight, warns in ((1e-6, False), (5.0, True)):
        loss_fn = sn.EnsembleLoss(diversity=moving(weight))
        module = EnsembleModule(sn.convert(dense(), 4), loss_fn, lr=0.05)
        monitor = DiversityMonitor(first_steps=1)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            fit(module, monitor, steps=8)
        assert ("outweighed task" in {f.kind for f in monitor.findings}) == warns


def moving(weight: float) -> sn.Diversity:
    """τ falls from 0.6 to 0.1; the weight is 0 until three quarters of the training."""
    ramp = sn.diversity.Ramp(weight, start=0.75)
    return sn.Diversity(lambda p: 0.6 - 0.5 * p, ramp, layers="all")


def test_settings_that_move_are_logged() -> None:
    monitor, ens = DiversityMonitor(first_steps=8), sn.convert(dense(), 4)
    module = EnsembleModule(ens, sn.EnsembleLoss(diversity=moving(1e-2)), lr=0.05)
    trainer = fit(module, monitor, steps=8)
    entries = [e for e in monitor.history if "tau" in e]
    assert [e["weight"] for e in entries] == [0.0] * 6 + [1e-2] * 2
    assert [e["tau"] for e in entries] == pytest.approx([0.6 - 0.5 * k / 8 for k in range(8)])
    logged = float(trainer.callback_metrics["diversity/tau"])
    assert logged == pytest.approx(0.6 - 0.5 * 7 / 8)


def test_tau_in_the_flat_part_of_the_dial_warns_at_the_start() -> None:
    diversity = sn.Diversity(tau=10.0, weight=1e-6, layers="all")
    monitor = DiversityMonitor(first_steps=1)
    with pytest.warns(SigmaNensWarning, match="tau=10 lies where the dial is flat"):
        fit(Module(sn.convert(dense(), 4), diversity=diversity), monitor, steps=3)
    # with two members there is no steep part to recommend
    fit(Module(sn.convert(dense(), 2), diversity=diversity), monitor, steps=3)


def test_weak_members_warn_at_the_end_if_one_network_is_known() -> None:
    batch = batches(1, seed=1)[0]
    monitor = DiversityMonitor(batch, single_nll=1e-3)
    with pytest.warns(SigmaNensWarning, match="each loses .* nats against one network"):
        fit(Module(sn.convert(dense(), 4), lr=1e-3), monitor, steps=3)
    fit(Module(sn.convert(dense(), 4)), DiversityMonitor(batch, single_nll=9.0), steps=3)


def test_members_that_differ_less_than_dropout_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "MODULATION", 0.0)
    network = nn.Sequential(
        nn.Dropout(0.6), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False)
    )
    ens = sn.convert(network, 3, init="preserve")
    monitor = DiversityMonitor(batches(1, seed=1)[0], first_steps=2)
    with pytest.warns(SigmaNensWarning, match="differ less than one of them does from itself"):
        fit(Module(ens, lr=1e-7), monitor, steps=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"first_steps": 0}, "first_steps is 0"),
        ({"first_steps": True}, "first_steps is True"),
    ],
)
def test_first_steps_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        DiversityMonitor(**options)


# -- what it looks at ----------------------------------------------------------------------------


def test_inputs_are_transformed_as_the_library_module_does_it() -> None:
    """Of a batch of bytes, say, which the network itself does not take."""
    ens = sn.convert(dense(), 3)
    module = EnsembleModule(ens, sn.EnsembleLoss(), lr=0.01, transform=lambda x: 0.5 * x - 1)
    monitor = DiversityMonitor(batches(1)[0])
    fit(module, monitor, steps=2)
    x, y = batches(1)[0]
    logits = ens.eval()(0.5 * x - 1)
    (found,) = [e for e in monitor.history if "jensen_gap" in e]
    assert found["jensen_gap"] == pytest.approx(sn.diversity.jensen_gap(logits, y))


def test_the_scales_are_those_that_the_penalty_acts_on() -> None:
    ens = sn.convert(dense(), 4)
    module = Module(ens)
    module.loss_fn = sn.EnsembleLoss()
    module.penalty = sn.Diversity(tau=0.5, weight=1e-4, layers="^4$")
    monitor = DiversityMonitor()
    fit(module, monitor, steps=2)
    assert monitor.history[-1]["cosine"] == sn.diversity.cosine(ens, "^4$")
    assert monitor.history[-1]["owners"] == sn.diversity.owners(ens, "^4$")
    assert sn.diversity.cosine(ens, "^4$") != sn.diversity.cosine(ens, "auto")


def test_a_short_training_is_judged_and_an_overflow_is_none_of_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ens = sn.convert(dense(), 4)
    diversity = sn.Diversity(tau=0.5, weight=5.0, layers="all")
    pulls = iter([(1.0, math.inf), (1.0, math.nan), (8.0, 0.1), (8.0, 0.3)])
    target = "sigmanens.integrations.diversity_callback.pull_norms"
    monkeypatch.setattr(target, lambda *_: next(pulls))
    monitor = DiversityMonitor(first_steps=20)
    with pytest.warns(SigmaNensWarning, match="40 times as hard as the task"):
        fit(Module(ens, lr=1e-9, diversity=diversity), monitor, steps=4)

"""Training of pictures in memory: repeatable to the bit, also through an interruption."""

from __future__ import annotations

import errno
import logging
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning")

import lightning as L
from tests.lab.small import digits, distance, ensemble, equal, network, penalised, single, snapshot

from sigmanens import Diversity, EnsembleLoss, SigmaEnsemble, diversity, evaluation
from sigmanens.baselines import SeparateNetworks
from sigmanens.errors import ConfigError, DataError, NonFiniteError, RunError
from sigmanens.lab.digits import Labelled
from sigmanens.lab.training import Recipe, drawn, members_of, parameters, train_network

DATA = digits(48)
HELD_OUT = digits(30, seed=7)
RECIPE = Recipe(epochs=3, batch_size=20, lr=0.05, flip_crop=1)
KEPT: dict[str, Any] = {"keep": "best", "averaging": 0.5}


def folded() -> SigmaEnsemble:
    return ensemble(schedule="folded")


def sequential() -> SigmaEnsemble:
    return ensemble(schedule="sequential")


def dropout() -> SeparateNetworks:
    torch.manual_seed(5)
    return SeparateNetworks(
        [
            nn.Sequential(
                nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5),
                nn.Linear(16, 10),
            )
        ]
    )  # fmt: skip


class Stop(RuntimeError):
    """The machine goes down."""


class StopAt(EnsembleLoss):
    """The loss, until the machine goes down at one of its calls."""

    def __init__(self, call: int, like: EnsembleLoss) -> None:
        super().__init__(diversity=like.diversity)
        self.left = call

    def task(self, logits: Tensor, y: Tensor, **options: Any) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise Stop
        return super().task(logits, y, **options)


@pytest.mark.parametrize(
    ("make", "loss_fn", "calls"),
    [(folded, penalised(), 3), (sequential, penalised(), 6), (dropout, EnsembleLoss(), 3)],
    ids=["folded", "sequential", "dropout"],
)
@pytest.mark.parametrize(("epoch", "kept"), [(1, KEPT), (2, {})])
def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    loss_fn: EnsembleLoss,
    calls: int,
    epoch: int,
    kept: dict[str, Any],
) -> None:
    whole, recipe = make(), replace(RECIPE, **kept)
    options: dict[str, Any] = {"seed": 3, "validation": HELD_OUT}
    done = train_network(whole, DATA, recipe, loss_fn, **options)
    broken = StopAt(calls * epoch + calls // 2, loss_fn)  # in the middle of the next epoch
    with pytest.raises(Stop):
        train_network(make(), DATA, recipe, broken, folder=tmp_path, **options)
    torch.manual_seed(99)  # nothing may hang on what was drawn in between
    again = make()
    resumed = train_network(again, DATA, recipe, loss_fn, folder=tmp_path, **options)
    assert equal(snapshot(again), snapshot(whole))
    assert resumed.history == done.history
    assert [entry["epoch"] for entry in done.history] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_finished_training_is_not_done_again(tmp_path: Path) -> None:
    first = folded()
    done = train_network(first, DATA, RECIPE, penalised(), folder=tmp_path)
    second = folded()
    again = train_network(second, DATA, RECIPE, StopAt(0, penalised()), folder=tmp_path)
    assert equal(snapshot(first), snapshot(second))
    assert again.history == done.history
    assert again.seconds >= done.seconds


def test_seconds_are_those_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sigmanens.lab.training.time.perf_counter", lambda: now[0])

    def tick() -> None:
        now[0] += 10

    with pytest.raises(Stop):
        train_network(folded(), DATA, RECIPE, StopAt(4, penalised()), folder=tmp_path, advance=tick)
    now[0] += 5000  # the night
    resumed = train_network(folded(), DATA, RECIPE, penalised(), folder=tmp_path, advance=tick)
    assert resumed.seconds == 30


def test_the_seed_decides() -> None:
    networks = []
    for seed in (1, 1, 2):
        networks.append(folded())
        train_network(networks[-1], DATA, RECIPE, penalised(), seed=seed)
    first, same, other = (snapshot(n) for n in networks)
    assert equal(first, same)
    assert distance(first, other) > 1e-3


def seen(make: Callable[[], nn.Module], seed: int, recipe: Recipe, **options: Any) -> Tensor:
    """The pictures of all epochs, in the order in which a training shows them."""
    shown: list[Tensor] = []
    model = make()

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        shown.append(inputs[0].clone())

    handle = model.register_forward_pre_hook(keep)
    try:
        train_network(model, DATA, recipe, EnsembleLoss(), seed=seed, **options)
    finally:
        handle.remove()
    return torch.cat(shown)


def test_order_and_augmentation_depend_on_seed_and_epoch_only() -> None:
    recipe = Recipe(epochs=2, batch_size=20, lr=0.01, flip_crop=1)
    one = seen(single, 1, recipe)
    assert torch.equal(one, seen(dropout, 1, recipe))
    assert torch.equal(one, seen(folded, 1, recipe))
    assert not torch.equal(one, seen(single, 2, recipe))
    assert len(one) == 96
    assert not torch.equal(one[:48], one[48:])


def test_an_epoch_shows_every_picture_once() -> None:
    shown = seen(single, 1, Recipe(epochs=2, batch_size=20, lr=0.01))
    for part in shown.split(48):
        assert sorted(part.flatten(1).tolist()) == sorted(DATA.images.flatten(1).tolist())
        assert not torch.equal(part, DATA.images)


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    model = dropout()
    before = torch.get_rng_state()
    train_network(model, DATA, Recipe(epochs=1), EnsembleLoss(), seed=4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [folded, sequential])
def test_half_precision_and_channels_last(make: Callable[[], SigmaEnsemble]) -> None:
    exact, half = make(), make()
    begin = snapshot(exact)
    recipe = Recipe(epochs=1, batch_size=20, lr=0.01)
    train_network(exact, DATA, recipe, penalised())
    other = Recipe(epochs=1, batch_size=20, lr=0.01, precision="bf16-mixed", channels_last=True)
    train_network(half, DATA, other, penalised())
    assert all(p.dtype == torch.float32 for p in half.parameters())
    conv = half.network.layer1[0].conv1.weight
    assert conv.is_contiguous(memory_format=torch.channels_last)
    moved = distance(begin, snapshot(exact))
    apart = distance(snapshot(exact), snapshot(half))
    assert 0 < apart < 0.5 * moved


@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "constant"])
def test_one_member_at_a_time_trains_the_same_network(schedule: str) -> None:
    recipe = Recipe(epochs=2, batch_size=16, lr=0.02, lr_schedule=schedule)
    together, apart = folded(), sequential()
    begin = snapshot(together)
    assert equal(begin, snapshot(apart))
    a = train_network(together, DATA, recipe, penalised())
    b = train_network(apart, DATA, recipe, penalised())
    assert distance(begin, snapshot(together)) > 0.1
    assert distance(snapshot(together), snapshot(apart)) < 2e-3
    assert [e["lr"] for e in a.history] == [e["lr"] for e in b.history]
    for entry, other in zip(a.history, b.history, strict=True):
        assert entry == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_history_tells_the_scales_of_each_epoch() -> None:
    model = folded()
    before = diversity.cosine(model, "auto")
    done = train_network(model, DATA, RECIPE, penalised())
    keys = {"epoch", "loss", "task", "penalty", "lr", "cosine", "owners", "saturation"}
    assert [set(entry) for entry in done.history] == [keys] * 3
    last = done.history[-1]
    assert last["cosine"] == diversity.cosine(model, "auto") != before
    assert last["owners"] == diversity.owners(model)
    assert last["saturation"] == diversity.saturation(model)
    assert all(e["loss"] == pytest.approx(e["task"] + e["penalty"]) for e in done.history)
    alone = train_network(single(), DATA, Recipe(epochs=1), EnsembleLoss()).history
    assert [set(entry) for entry in alone] == [{"epoch", "loss", "task", "lr"}]


def test_training_learns_and_leaves_evaluation_mode() -> None:
    data = digits(200)
    model = folded()
    recipe = Recipe(epochs=12, batch_size=40, lr=0.2, weight_decay=0.0)
    done = train_network(model, data, recipe, EnsembleLoss())
    assert not model.training
    assert done.history[-1]["task"] < 0.6 * done.history[0]["task"]
    right = (model.predict(data.images).labels == data.labels).float().mean()
    assert right > 0.7


def test_unusable_pictures_are_named() -> None:
    empty = Labelled(DATA.images[:0], DATA.labels[:0])
    with pytest.raises(DataError, match="training set is empty"):
        train_network(single(), empty, RECIPE, EnsembleLoss())
    images = DATA.images.clone()
    images[7, 0, 3, 3] = float("nan")
    with pytest.raises(DataError, match="NaN or infinite"):
        train_network(single(), Labelled(images, DATA.labels), RECIPE, EnsembleLoss())


@pytest.mark.parametrize("make", [folded, sequential])
def test_a_loss_that_explodes_stops_the_training(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(NonFiniteError, match="learning rate that is too high"):
        train_network(make(), DATA, Recipe(epochs=5, lr=1e20), EnsembleLoss())


@pytest.mark.parametrize("make", [folded, sequential])
def test_nothing_is_written_printed_or_warned_about(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    make: Callable[[], nn.Module],
) -> None:
    work, state = tmp_path / "work", tmp_path / "state"
    work.mkdir()
    monkeypatch.chdir(work)
    level = logging.getLogger("lightning.pytorch").level
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Stop):
            train_network(make(), DATA, RECIPE, StopAt(8, penalised()), folder=state)
        train_network(make(), DATA, RECIPE, penalised(), folder=state)
        train_network(make(), DATA, RECIPE, penalised())
    assert [str(w.message) for w in caught] == []
    assert capfd.readouterr() == ("", "")
    assert list(work.iterdir()) == []
    assert logging.getLogger("lightning.pytorch").level == level


def test_ctrl_c_comes_through_and_the_finished_epoch_is_kept(tmp_path: Path) -> None:
    epochs = 0

    def interrupt() -> None:
        nonlocal epochs
        epochs += 1
        if epochs == 2:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            train_network(folded(), DATA, RECIPE, penalised(), folder=tmp_path, advance=interrupt)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, handler)
    whole, again = folded(), folded()
    train_network(whole, DATA, RECIPE, penalised())
    epochs = 10
    train_network(again, DATA, RECIPE, penalised(), folder=tmp_path, advance=interrupt)
    assert epochs == 12
    assert equal(snapshot(whole), snapshot(again))


def test_a_full_disk_leaves_the_state_of_the_epoch_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = L.Trainer.save_checkpoint
    calls = 0

    def fill(self: L.Trainer, filepath: Path, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            filepath.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, filepath, *args)

    with monkeypatch.context() as patch:
        patch.setattr(L.Trainer, "save_checkpoint", fill)
        with pytest.raises(RunError, match=r"No space left on device.*free space and resume"):
            train_network(folded(), DATA, RECIPE, penalised(), folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    whole, again = folded(), folded()
    train_network(whole, DATA, RECIPE, penalised())
    done = train_network(again, DATA, RECIPE, penalised(), folder=tmp_path)
    assert equal(snapshot(whole), snapshot(again))
    assert len(done.history) == 3


@pytest.mark.parametrize("damage", ["truncated", "empty", "other"])
def test_a_damaged_state_is_named(tmp_path: Path, damage: str) -> None:
    train_network(single(), DATA, Recipe(epochs=1), EnsembleLoss(), folder=tmp_path)
    state = tmp_path / "last.ckpt"
    payload = state.read_bytes()
    parts = {"truncated": payload[: len(payload) // 2], "empty": b"", "other": b"hello" * 100}
    state.write_bytes(parts[damage])
    with pytest.raises(RunError, match=r"last\.ckpt cannot be read.*Remove it"):
        train_network(single(), DATA, Recipe(epochs=1), EnsembleLoss(), folder=tmp_path)


def test_parameters_count_what_is_trained_or_could_be() -> None:
    model = ensemble(members=3, train="members")
    base = sum(p.numel() for p in network().parameters())
    norms = sum(p.numel() for m in network().modules() if isinstance(m, nn.BatchNorm2d)
                for p in m.parameters())  # fmt: skip
    heads = 3 * (2 * 8 + 8 * 10 + 10) - (8 * 10 + 10)
    assert parameters(model) == base - norms + 3 * norms // 2 + heads
    assert members_of(model) == 3
    assert members_of(single()) == 1


@pytest.mark.parametrize("make", [folded, sequential])
def test_a_penalty_that_moves_goes_on_where_it_was(
    make: Callable[[], SigmaEnsemble], tmp_path: Path
) -> None:
    """A late rising weight and a falling τ, across an interruption."""
    recipe = Recipe(epochs=4, batch_size=20, lr=0.05)

    def loss() -> EnsembleLoss:
        weight = diversity.Ramp(0.1, start=0.25, length=0.25)
        return EnsembleLoss(diversity=Diversity(lambda p: 1 - 0.9 * p, weight))

    whole, loss_whole = make(), loss()
    train_network(whole, DATA, recipe, loss_whole, seed=1)
    steps = 4 * -(-len(DATA.labels) // 20)
    assert loss_whole.diversity is not None
    assert loss_whole.diversity.progress == (steps - 1) / steps

    def stop() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    left = 2
    with pytest.raises(KeyboardInterrupt):
        train_network(make(), DATA, recipe, loss(), seed=1, folder=tmp_path, advance=stop)
    resumed = make()
    train_network(resumed, DATA, recipe, loss(), seed=1, folder=tmp_path)
    assert equal(snapshot(whole), snapshot(resumed))


def test_a_small_last_batch_may_be_left_out() -> None:
    recipe = Recipe(epochs=2, batch_size=20, lr=0.01)
    whole = seen(single, 1, recipe)
    less = seen(single, 1, replace(recipe, drop_last=True))
    assert (len(whole), len(less)) == (96, 80)
    assert torch.equal(less[:40], whole[:40])
    assert torch.equal(less[40:], whole[48:88])
    few = seen(single, 1, replace(recipe, batch_size=200, drop_last=True))
    assert len(few) == 96  # there is no whole batch to keep


class Rows(EnsembleLoss):
    """The loss, which keeps the labels that it was shown."""

    def __init__(self) -> None:
        super().__init__(diversity=None)
        self.shown: list[Tensor] = []

    def task(self, logits: Tensor, y: Tensor, **options: Any) -> Tensor:
        self.shown.append(y.clone())
        return super().task(logits, y, **options)


@pytest.mark.parametrize("mode", ["own", "share"])
def test_members_may_have_batches_of_their_own(mode: str) -> None:
    numbered = Labelled(DATA.images, torch.arange(48) % 10)
    recipe = Recipe(epochs=1, batch_size=20, lr=0.05, flip_crop=1, member_batches=mode)
    same, own = Rows(), Rows()
    train_network(ensemble(2, schedule="sequential"), numbered, recipe, own, seed=3)
    plain = replace(recipe, member_batches="same")
    train_network(ensemble(2, schedule="folded"), numbered, plain, same, seed=3)
    first, second = torch.cat(own.shown[::2]), torch.cat(own.shown[1::2])
    together = torch.cat(same.shown)
    if mode == "own":  # each goes through all of them, the first in the order of all
        assert torch.equal(first, together)
        assert torch.equal(second.sort().values, together.sort().values)
        assert not torch.equal(second, together)
    else:  # together they go through all of them once
        assert [len(y) for y in own.shown] == [10, 10, 10, 10, 4, 4]
        assert torch.equal(torch.cat(own.shown), together)


@pytest.mark.parametrize("mode", ["own", "share"])
def test_batches_of_their_own_train_folded_as_they_do_one_at_a_time(mode: str) -> None:
    recipe = Recipe(epochs=2, batch_size=20, lr=0.05, flip_crop=1, member_batches=mode)
    nets = [ensemble(2, schedule=s) for s in ("folded", "sequential")]
    told = [train_network(n, DATA, recipe, penalised(), seed=1) for n in nets]
    assert told[0].history[-1]["loss"] == pytest.approx(told[1].history[-1]["loss"], abs=1e-4)
    assert distance(snapshot(nets[0]), snapshot(nets[1])) < 1e-3
    other = ensemble(2, schedule="folded")
    train_network(other, DATA, replace(recipe, member_batches="same"), penalised(), seed=1)
    assert distance(snapshot(nets[0]), snapshot(other)) > 1e-2


def test_a_share_too_small_for_all_members_is_left_out() -> None:
    recipe = Recipe(epochs=1, batch_size=47, lr=0.01, member_batches="share")
    loss = Rows()
    train_network(ensemble(2, schedule="folded"), Labelled(*(t[:48] for t in DATA)), recipe, loss)
    assert [len(y) for y in loss.shown] == [46]  # of 47, then of 1


def test_batches_of_their_own_need_an_ensemble_that_takes_them() -> None:
    recipe = Recipe(epochs=1, member_batches="own")
    torch.manual_seed(0)
    two = SeparateNetworks([network(0), network(1)])
    with pytest.raises(ConfigError, match="SeparateNetworks gives all members the same batch"):
        train_network(two, DATA, recipe, EnsembleLoss())
    alone, alike = single(), single()
    recipe = replace(recipe, epochs=1, batch_size=20)
    train_network(alone, DATA, recipe, EnsembleLoss())
    train_network(alike, DATA, replace(recipe, member_batches="same"), EnsembleLoss())
    assert equal(snapshot(alone), snapshot(alike))


def test_validation_examples_are_watched_and_change_nothing() -> None:
    recipe = Recipe(epochs=2, batch_size=20, lr=0.05, flip_crop=1)
    watched, alone = ensemble(3), ensemble(3)
    held_out = HELD_OUT
    told = train_network(watched, DATA, recipe, penalised(), seed=1, watched=held_out)
    train_network(alone, DATA, recipe, penalised(), seed=1)
    assert equal(snapshot(watched), snapshot(alone))
    pred = watched.predict(held_out.images)
    expected = evaluation.diversity.jensen_gap(pred.member_log_probs, held_out.labels)
    assert told.history[-1]["val_jensen_gap"] == pytest.approx(float(expected), abs=1e-5)
    assert told.history[0]["val_jensen_gap"] != told.history[1]["val_jensen_gap"]


def test_the_epoch_with_the_lowest_tempered_nll_is_kept() -> None:
    """A network that is trained well at first and then at a ruinous rate."""
    recipe = Recipe(
        epochs=6, batch_size=24, lr=1.0, lr_schedule="multistep", milestones=[3], gamma=20.0,
        weight_decay=0.0,
    )  # fmt: skip
    kept, last = ensemble(3), ensemble(3)
    done = train_network(
        kept, DATA, replace(recipe, keep="best"), EnsembleLoss(), validation=HELD_OUT
    )
    train_network(last, DATA, recipe, EnsembleLoss(), validation=HELD_OUT)
    scores = [entry["val_nll_calibrated"] for entry in done.history]
    assert scores.index(min(scores)) < 5
    found = []
    for trained in (kept, last):
        log_probs = trained.predict(HELD_OUT.images).log_probs.double()
        temperature = evaluation.fit_temperature(log_probs, HELD_OUT.labels)
        scaled = evaluation.apply_temperature(log_probs, temperature)
        found.append(evaluation.nll(scaled, HELD_OUT.labels))
    assert found == pytest.approx([min(scores), scores[-1]], rel=1e-5)
    with pytest.raises(ConfigError, match="needs validation examples"):
        train_network(ensemble(2), DATA, replace(recipe, keep="best"), EnsembleLoss())


def test_the_average_of_weights_and_statistics_takes_the_place_of_the_network() -> None:
    """One step an epoch, so that the weights after each step can be looked at."""
    recipe = Recipe(epochs=4, batch_size=48, lr=0.1)
    plain, averaged = ensemble(2), ensemble(2)
    steps: list[dict[str, Tensor]] = []
    train_network(plain, DATA, recipe, penalised(), advance=lambda: steps.append(snapshot(plain)))
    train_network(averaged, DATA, replace(recipe, averaging=0.7), penalised())
    expected = steps[0]
    for step in steps[1:]:
        for key, value in step.items():
            new = 0.7 * expected[key] + 0.3 * value
            expected[key] = new if value.is_floating_point() else value
    assert distance(snapshot(averaged), expected) < 1e-6
    assert distance(snapshot(averaged), snapshot(plain)) > 1e-3


def test_what_is_watched_is_drawn_once() -> None:
    data = digits(30)
    some = drawn(data, 10)
    assert some is not None
    again = drawn(data, 10)
    assert again is not None
    assert len(some.labels) == 10
    assert torch.equal(some.images, again.images)
    assert drawn(data, 0) is None
    every = drawn(data, 99)
    assert every is not None
    assert torch.equal(every.labels, data.labels)


def test_heads_have_the_rate_that_the_recipe_says() -> None:
    network = folded()
    before = snapshot(network)
    train_network(network, DATA, replace(RECIPE, epochs=1, head_lr_mult=0.0), EnsembleLoss())
    moved = {n for n, p in network.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, _ in network.named_parameters() if ".heads." not in n}

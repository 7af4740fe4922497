"""What holds for every rival: shapes, training through the common path, repeatable evaluation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.rivals import MEMBERS, RIVALS, X, Y, base_of, trained_statistics

from sigmanens import EnsembleLoss
from sigmanens.baselines import base as common
from sigmanens.baselines import batchensemble, laplace, lora_ensemble
from sigmanens.errors import InputError, MissingPackageError
from sigmanens.lab.config import Recipe
from sigmanens.lab.digits import Labelled
from sigmanens.lab.training import members_of, train_network

every_rival = pytest.mark.parametrize("name", RIVALS)


@every_rival
def test_logits_gradients_and_evaluation(name: str) -> None:
    base = base_of(name)
    before = {k: v.clone() for k, v in base.state_dict().items()}
    state = torch.get_rng_state()
    net = RIVALS[name](base).train()
    assert torch.equal(torch.get_rng_state(), state)  # all is drawn from the generator given
    again = RIVALS[name](base)
    for ours, theirs in zip(net.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)

    logits = net(X)
    assert logits.shape[1:] == (6, 10)
    loss = EnsembleLoss()(logits, Y, net)
    torch.testing.assert_close(loss, torch.stack([F.cross_entropy(z, Y) for z in logits]).mean())
    loss.backward()
    for key, p in net.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, key
            # Behind B = 0 nothing reaches A in the first step.
            assert bool(p.grad.any()) is ("lora_A" not in key), key
    assert all(torch.equal(v, before[k]) for k, v in base.state_dict().items())
    assert all(p.grad is None for p in base.parameters())

    net.eval()
    first = net(X)
    members = members_of(net)
    assert first.shape == (members, 6, 10)
    assert members == (1 if name == "norm_tuning" else MEMBERS)
    assert torch.equal(net(X), first)
    assert torch.equal(copy.deepcopy(net)(X), first)
    differ = [not torch.allclose(first[0], z, atol=1e-4) for z in first[1:]]
    assert all(differ)


@every_rival
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_training_through_the_common_path(name: str) -> None:
    net = RIVALS[name](base_of(name))
    before = {k: p.detach().clone() for k, p in net.named_parameters()}
    recipe = Recipe(
        epochs=1, batch_size=3, lr=0.05, weight_decay=1e-3, precision="bf16-mixed",
        channels_last=True,
    )  # fmt: skip
    done = train_network(net, Labelled(X, Y), recipe, EnsembleLoss())
    assert done.history[0]["loss"] > 0
    for key, p in net.named_parameters():
        assert torch.equal(p, before[key]) is not p.requires_grad, key
        assert bool(torch.isfinite(p).all())
    assert not net.training
    assert torch.equal(net(X), net(X))


def test_members_do_not_depend_on_the_rest_of_the_batch() -> None:
    for name, build in RIVALS.items():
        if name in ("mc_dropout", "norm_tuning"):
            continue
        net = build(base_of(name)).eval()
        torch.testing.assert_close(net(X)[:, 2:4], net(X[2:4]), rtol=1e-4, atol=1e-5)


def test_a_factory_is_as_good_as_a_network() -> None:
    for name, build in RIVALS.items():
        ours = build(lambda name=name: base_of(name))
        assert torch.equal(ours.eval()(X), build(base_of(name)).eval()(X))


def test_statistics_are_trained_and_used() -> None:
    for name in ("heads_only", "batchensemble", "packed", "masksembles", "mimo"):
        net = RIVALS[name](base_of(name)).eval()
        fresh = net(X)
        trained_statistics(net)
        assert not torch.allclose(net(X), fresh, atol=1e-3)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(common, "import_module", absent)
    with pytest.raises(MissingPackageError, match=r"torch-uncertainty, which .*sigmanens\[lab,ben"):
        batchensemble(base_of("batchensemble"), 2)
    with pytest.raises(MissingPackageError, match="peft"):
        lora_ensemble(base_of("lora_ensemble"), 2)
    with pytest.raises(MissingPackageError, match="laplace-torch"):
        laplace(base_of("laplace"))


@pytest.mark.parametrize("members", [0, -1, 2.0, True, "4"])
def test_a_number_of_members_is_an_integer_from_one(members: object) -> None:
    with pytest.raises(InputError, match="expected an integer ≥ 1"):
        batchensemble(base_of("batchensemble"), members)  # type: ignore[arg-type]


def test_a_base_is_a_network_or_makes_one() -> None:
    with pytest.raises(InputError, match=r"got a str; expected an nn\.Module or a function"):
        batchensemble("resnet18", 2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="got a int"):
        batchensemble(lambda: 3, 2)  # type: ignore[arg-type, return-value]

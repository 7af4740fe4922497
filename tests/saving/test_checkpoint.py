"""Saving what the members add, and getting bit-equal outputs back on the untouched base."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.networks import Encoder, Pictures, Tied, Words, dense, randomise
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.conversion.fingerprint import fingerprint
from sigmanens.errors import CheckpointError


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = nn.RMSNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "batch_norm": (Pictures, lambda: torch.randn(6, 1, 8, 8)),
    "layer_norm": (Words, lambda: torch.randint(11, (6, 5))),
    "rms_norm": (RootMeanSquare, lambda: torch.randn(6, 4)),
    "tied": (Tied, lambda: torch.randn(6, 4)),
    "tied_batch_norm": (lambda: Tied(True), lambda: torch.randn(6, 4)),
    "transformer": (lambda: Encoder(False), lambda: torch.randn(6, 5, 8)),
    "root": (lambda: nn.LayerNorm(4), lambda: torch.randn(6, 4)),
}


def train(ens: sn.SigmaEnsemble, x: Tensor, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.01), momentum=0.9)
    ens.train()
    for _ in range(steps):
        optimizer.zero_grad()
        sn.EnsembleLoss()(ens(x), torch.arange(len(x)) % 3).backward()
        optimizer.step()


def outputs(ens: sn.SigmaEnsemble, x: Tensor) -> Tensor:
    return ens.eval()(x).detach()


def saved(ens: sn.SigmaEnsemble, folder: Path, **options: str) -> dict[str, Tensor]:
    return load_file(ens.save_pretrained(folder, **options))


# -- the round trip ----------------------------------------------------------------------------


@pytest.mark.case("S1")
@pytest.mark.parametrize("train_what", ["nothing", "members", "all"])
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_bit_equal_after_the_round_trip(
    name: str, train_what: str, tmp_path: Path
) -> None:
    make, draw = NETWORKS[name]
    base = randomise(make()).eval()
    fresh = copy.deepcopy(base)
    x = draw()
    options: dict[str, Any] = {"head": "shared"} if name == "root" else {}
    if train_what == "members":
        options["train"] = "members"
    ens = sn.convert(base, 3, **options)
    if train_what != "nothing":
        train(ens, x)
    expected = outputs(ens, x)
    ens.save_pretrained(tmp_path / "deep" / "folder")
    again = sn.load(tmp_path / "deep" / "folder", base=fresh)
    assert torch.equal(outputs(again, x), expected)
    assert again.plan == ens.plan
    assert again.state_dict().keys() == ens.state_dict().keys()
    for key, value in ens.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    train_modes = [(n, p.requires_grad) for n, p in ens.named_parameters()]
    assert [(n, p.requires_grad) for n, p in again.named_parameters()] == train_modes
    train(ens, x, 1)
    train(again, x, 1)
    torch.testing.assert_close(outputs(again, x), outputs(ens, x))


@pytest.mark.parametrize(
    "options",
    [
        {"init": "normal"},
        {"init": "normal", "scale": "linear"},
        {"shift": True},
        {"layers": "bn2"},
        {"head": "fresh"},
        {"head": "shared"},
        {"schedule": 2},
    ],
    ids=str,
)
def test_every_kind_of_conversion_comes_back(options: dict[str, Any], tmp_path: Path) -> None:
    base = randomise(Pictures(3))
    ens = sn.convert(base, 3, **options)
    x = torch.randn(6, 1, 8, 8)
    train(ens, x)
    ens.save_pretrained(tmp_path)
    again = sn.load(tmp_path, base=base)
    assert torch.equal(outputs(again, x), outputs(ens, x))
    assert str(again.sigma_norms()) == str(ens.sigma_norms())
    assert again.report.converted == ens.report.converted
    assert str(again.report).startswith("Pictures as an ensemble of 3 members")


def test_settings_chosen_after_conversion_are_kept(tmp_path: Path) -> None:
    base = randomise(Words())
    ens = sn.convert(base, 3, batch_dims={"mask": None})
    ens.temperature.fill_(1.7)
    ens.schedule = "sequential"
    ens.save_pretrained(tmp_path)
    again = sn.load(tmp_path, base=base.eval())
    assert float(again.temperature) == pytest.approx(1.7)
    assert again.schedule == "sequential"
    assert again.plan.batch_dims == {"mask": None}
    assert not again.training
    ids, mask = torch.randint(11, (4, 4)), torch.ones(1, 1, 4, 4)
    assert torch.equal(again(ids, mask), ens.eval()(ids, mask))  # no guess, so no warning
    assert torch.equal(again.predict(ids).probs, ens.predict(ids).probs)


def test_an_ensemble_in_half_precision_comes_back(tmp_path: Path) -> None:
    base = randomise(Pictures()).eval().bfloat16()
    ens = sn.convert(base, 2)
    ens.save_pretrained(tmp_path)
    x = torch.randn(2, 1, 8, 8).bfloat16()
    assert torch.equal(outputs(sn.load(tmp_path, base=base), x), outputs(ens, x))


def test_the_base_is_not_touched_by_loading(tmp_path: Path) -> None:
    base = randomise(Pictures()).train()
    ens = sn.convert(base, 2)
    train(ens, torch.randn(6, 1, 8, 8))
    ens.save_pretrained(tmp_path)
    before = {k: v.clone() for k, v in base.state_dict().items()}
    text, state = str(base), torch.get_rng_state()
    again = sn.load(tmp_path, base=base)
    assert torch.equal(torch.get_rng_state(), state)
    assert str(base) == text
    assert all(torch.equal(v, before[k]) for k, v in base.state_dict().items())
    assert again.training


# -- what is written ---------------------------------------------------------------------------


@pytest.mark.case("S1")
def test_only_what_the_members_add_is_written(tmp_path: Path) -> None:
    base = randomise(nn.Sequential(nn.Linear(500, 500), nn.LayerNorm(500), nn.Linear(500, 3)))
    ens = sn.convert(base, 2)
    path = ens.save_pretrained(tmp_path)
    size = path.stat().st_size
    assert size < 30_000 < sum(p.numel() * 4 for p in base.parameters())
    assert set(load_file(path)) == {
        "1.scale_logit", "1.carrier", "1.shift",
        "2.heads.0.weight", "2.heads.0.bias", "2.heads.1.weight", "2.heads.1.bias",
    }  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, "sigmanens.json"])


@pytest.mark.parametrize("shared", ["auto", "never", "always"])
def test_shared_tensors(shared: str, tmp_path: Path) -> None:
    base = randomise(Pictures(3))
    x = torch.randn(6, 1, 8, 8)
    ens = sn.convert(base, 2, train="members")
    train(ens, x)
    convolutions = {"conv1.weight", "conv2.weight"}
    keys = set(saved(ens, tmp_path / "members", shared=shared))
    assert keys >= {"bn1.scale_logit", "bn1.running_var", "bn1.num_batches_tracked"}
    assert (keys & convolutions) == (convolutions if shared == "always" else set())
    ens.network.conv2.weight.data[0, 0, 0, 0] += 1e-3
    if shared == "never":
        with pytest.raises(
            CheckpointError, match=r"1 shared tensors have changed .*'conv2\.weight'"
        ):
            ens.save_pretrained(tmp_path / "all", shared=shared)
        assert not (tmp_path / "all").exists()
        return
    keys = set(saved(ens, tmp_path / "all", shared=shared))
    assert (keys & convolutions) == (convolutions if shared == "always" else {"conv2.weight"})
    again = sn.load(tmp_path / "all", base=base)
    assert torch.equal(outputs(again, x), outputs(ens, x))


def test_a_kept_norm_is_shared_but_its_statistics_are_the_members(tmp_path: Path) -> None:
    ens = sn.convert(randomise(Pictures(3)), 2, layers="bn1", train="members")
    keys = set(saved(ens, tmp_path))
    assert keys >= {"bn2.running_mean", "bn2.running_var", "bn2.num_batches_tracked"}
    assert not keys & {"bn2.weight", "bn2.bias"}


def test_changes_are_counted_from_the_original_base_after_a_reload(tmp_path: Path) -> None:
    base = randomise(Pictures(3))
    ens = sn.convert(base, 2)
    train(ens, torch.randn(6, 1, 8, 8))
    first = saved(ens, tmp_path / "first")
    again = sn.load(tmp_path / "first", base=base)
    second = saved(again, tmp_path / "second")
    assert first.keys() == second.keys()
    assert "conv1.weight" in second
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(outputs(sn.load(tmp_path / "second", base=base), x), outputs(ens, x))


def test_a_reload_onto_a_base_trained_meanwhile_still_counts_from_the_original(
    tmp_path: Path,
) -> None:
    base = randomise(Pictures(3))
    ens = sn.convert(base, 2)
    train(ens, torch.randn(6, 1, 8, 8))
    ens.save_pretrained(tmp_path / "first")
    trained = copy.deepcopy(base)
    with torch.no_grad():
        trained.conv1.weight.copy_(ens.network.conv1.weight)
    again = sn.load(tmp_path / "first", base=trained)
    assert "conv1.weight" in saved(again, tmp_path / "second")
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(outputs(sn.load(tmp_path / "second", base=base), x), outputs(ens, x))


def test_fingerprints_tell_bytes_shape_and_dtype_apart() -> None:
    whole = torch.randn(33)
    variants = [
        whole[1:], whole[:32], whole[1:].view(4, 8), whole[1:].view(8, 4), whole[1:].flip(0),
        whole[1:].view(torch.int32), whole[1:].double(), whole[1:].half(), whole[:0], whole[0],
        torch.tensor([True, False]), torch.tensor([False, True]), torch.tensor([1, 0]),
    ]  # fmt: skip
    prints = [fingerprint(v) for v in variants]
    assert len(set(prints)) == len(prints)
    for v, p in zip(variants, prints, strict=True):
        assert fingerprint(v.clone()) == p
    strided = torch.randn(4, 8).t()
    assert fingerprint(strided) == fingerprint(strided.contiguous())


@pytest.mark.case("S3")
@pytest.mark.parametrize("scale", ["sigmoid", "linear"])
def test_no_key_of_ours_has_a_name_that_transformers_renames(scale: str) -> None:
    ens = sn.convert(randomise(Pictures()), 2, scale=scale, shift=True, layers="bn1")
    assert not [k for k in ens.state_dict() if "gamma" in k or "beta" in k]


@pytest.mark.case("S3")
def test_a_bert_survives_the_naming_rules_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, num_labels=3, max_position_embeddings=16,
    )  # fmt: skip
    cls = transformers.BertForSequenceClassification
    base = randomise(cls(config)).eval()
    base.save_pretrained(tmp_path / "base")
    ens = sn.convert(cls.from_pretrained(tmp_path / "base"), 3)
    ids = torch.randint(11, (4, 5))
    train_inputs = torch.randint(11, (6, 5))
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.01))
    sn.EnsembleLoss()(ens(train_inputs).logits, torch.arange(6) % 3).backward()
    optimizer.step()
    ens.eval()
    expected = ens(ids).logits
    ens.save_pretrained(tmp_path / "members")
    again = sn.load(tmp_path / "members", base=cls.from_pretrained(tmp_path / "base"))
    assert torch.equal(again(ids).logits, expected)
    # the converted network itself, written by transformers: every key keeps its name
    ens.network.save_pretrained(tmp_path / "network")
    written = load_file(tmp_path / "network" / "model.safetensors")
    assert set(written) == set(ens.network.state_dict())
    other = sn.convert(base, 3)
    with torch.no_grad():
        other.network.load_state_dict(written)
    assert torch.equal(other.eval()(ids).logits, expected)
    # and a member is a model that from_pretrained reads
    ens.member(1).save_pretrained(tmp_path / "single")
    single = cls.from_pretrained(tmp_path / "single")
    torch.testing.assert_close(single(ids).logits, expected[1], rtol=1e-4, atol=1e-5)


def test_an_older_checkpoint_is_replaced(tmp_path: Path) -> None:
    base = randomise(dense())
    x = torch.randn(3, 4)
    first, second = sn.convert(base, 2, init="normal"), sn.convert(base, 2, init="normal")
    first.save_pretrained(tmp_path)
    second.save_pretrained(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(outputs(sn.load(tmp_path, base=base), x), outputs(second, x))

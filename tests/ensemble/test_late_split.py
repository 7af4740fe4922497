"""A late split stays one: what lies before the members part runs once, whatever the mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers
from tests.networks import apart, randomise
from tests.oracles.prefix import First, LateSplit, Then
from timm.layers import DropPath, drop_path
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sigmanens as sn
from sigmanens.errors import DiversityError

MEMBERS = 3


class Random(nn.Module):
    """Random layers and functions, batch norms and a residual path in front of the last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.drop, self.first = nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6)
        self.body, self.path, self.second = nn.Linear(6, 6), DropPath(0.4), nn.BatchNorm1d(6)
        self.last, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(self.stem(x), 0.3, self.training)
        y = self.first(self.drop(h))
        y = drop_path(self.path(self.second(self.body(y))), 0.4, self.training) + y
        return y, F.dropout(h, 0.5, self.training)

    def after(self, y: Tensor, h: Tensor) -> Tensor:
        return self.head(self.last(y) + h)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(*self.before(x))


class Layers(Random):
    """The same with random layers alone, none of them between the modules."""

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.stem(x)
        y = self.first(self.drop(h))
        return self.path(self.second(self.body(y))) + y, h


def vit() -> nn.Module:
    return timm.create_model(
        "test_vit", num_classes=3, img_size=32, drop_path_rate=0.5, pos_drop_rate=0.3
    )


def vit_first(net: Any, x: Tensor) -> Tensor:
    return net.blocks[:4](net.norm_pre(net.patch_drop(net._pos_embed(net.patch_embed(x)))))


def efficientnet() -> nn.Module:
    return torchvision.models.efficientnet_b0(num_classes=3, stochastic_depth_prob=0.6, dropout=0.0)


def deberta() -> nn.Module:
    config = transformers.DebertaV2Config(
        vocab_size=30, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, num_labels=3, pooler_dropout=0.0,
    )  # fmt: skip
    return transformers.DebertaV2ForSequenceClassification(config)


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=30, d_model=16, encoder_layers=3, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_labels=3,
        max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, dropout=0.3,
        encoder_layerdrop=0.3,
    )  # fmt: skip
    return transformers.BartForSequenceClassification(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def pictures(size: int = 32) -> Tensor:
    return torch.randn(4, 3, size, size)


def words() -> dict[str, Tensor]:
    ids = torch.randint(3, 30, (4, 6))
    ids[:, -1] = 2
    return {"input_ids": ids, "attention_mask": torch.ones(4, 6, dtype=torch.long)}


# Networks, the norms that are converted, and inputs.
SPLITS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[], Any]]] = {
    "own": (Random, "last", lambda: torch.randn(4, 4)),
    "timm ViT": (vit, r"blocks\.[45]|^norm", pictures),
    "timm ResNet": (
        lambda: timm.create_model("test_resnet", num_classes=3, drop_path_rate=0.4, drop_rate=0.2),
        "layer4", lambda: pictures(64),
    ),
    "torchvision EfficientNet": (efficientnet, r"features\.[78]", pictures),
    "torchvision DenseNet": (
        lambda: torchvision.models.DenseNet(8, (2, 2), 16, drop_rate=0.3, num_classes=3),
        "denseblock2|norm5", pictures,
    ),
    "transformers BERT": (bert, r"layer\.2", words),
    "transformers DeBERTa": (deberta, r"layer\.2", words),
    "transformers BART": (bart, r"decoder\.layers\.1", words),
}  # fmt: skip


def call(network: nn.Module, x: Any) -> Any:
    y = network(**x) if isinstance(x, dict) else network(x)
    return getattr(y, "logits", y)


def flops(ens: sn.SigmaEnsemble, x: Any) -> int:
    ens.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(ens, x)
    return counter.get_total_flops()


def statistics(network: nn.Module) -> dict[str, Tensor]:
    return {n: b.clone() for n, b in network.named_buffers() if "running" in n or "tracked" in n}


def train(ens: sn.SigmaEnsemble, x: Any, way: str | int) -> None:
    """A step of training in one of the ways there are."""
    y, loss_fn = torch.randint(3, (4,)), sn.EnsembleLoss()
    ens.train()
    if way == "backward":
        ens.backward(x, y, loss_fn)
        return
    ens.schedule = way
    loss_fn(call(ens, x), y).backward()
    ens.schedule = "auto"


@pytest.mark.parametrize("name", SPLITS)
def test_multiply_adds_stay_after_training(name: str) -> None:
    make, layers, inputs = SPLITS[name]
    ens = sn.convert(randomise(make()), MEMBERS, layers=layers, head="copy", init="preserve")
    apart(ens)
    x = inputs()
    flops(ens, x)  # the first batch, with its trials
    before, one = flops(ens, x), flops(sn.convert(randomise(make()), 1), x)
    assert before < 0.8 * MEMBERS * one
    assert ens.plan.prefix
    for way in ("folded", "sequential", 2, "backward"):
        train(ens, x, way)
    assert flops(ens, x) == before
    before = tuple(f"{n}." for n in ens.plan.prefix)
    counted = {k: v for k, v in statistics(ens.network).items() if "tracked" in k}
    for key, count in counted.items():  # one set of statistics, which a step moves once
        assert torch.equal(count, torch.full([] if key.startswith(before) else [MEMBERS], 11)), key


CUTS: dict[str, tuple[First, Then]] = {
    "own": (lambda net, x: net.before(x), lambda net, h: net.after(*h)),
    "timm ViT": (vit_first, lambda net, h: net.forward_head(net.norm(net.blocks[4:](h)))),
    "torchvision EfficientNet": (
        lambda net, x: net.features[:7](x),
        lambda net, h: net.classifier(net.avgpool(net.features[7:](h)).flatten(1)),
    ),
}


def quiet(name: str, network: nn.Module) -> nn.Module:
    """The network without random layers in the members part, which folded members draw together."""
    if name == "timm ViT":
        for module in network.blocks[4:].modules():
            if isinstance(module, DropPath):
                module.drop_prob = 0.0
    if name == "torchvision EfficientNet":
        for module in network.features[7:].modules():
            if isinstance(module, torchvision.ops.StochasticDepth):
                module.p = 0.0
    return network


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(n, w, marks=[pytest.mark.slow] if "torchvision" in n else [])
        for n in CUTS
        for w in ("folded", "sequential", 2, "backward")
    ],
)
def test_values_gradients_and_statistics_are_those_of_one_network_and_its_members(
    name: str, way: str | int
) -> None:
    make, layers, inputs = SPLITS[name]
    base = quiet(name, randomise(make())).double()
    ens = apart(sn.convert(base, MEMBERS, layers=layers, head="copy", init="preserve"))
    x, y = inputs().double(), torch.randint(3, (4,))
    ens.eval()(x)  # finds the prefix
    oracle = LateSplit(base, ens.train(), *CUTS[name])
    torch.manual_seed(5)
    losses = torch.stack([F.cross_entropy(logits, y) for logits in oracle(x)])
    losses.mean().backward()
    torch.manual_seed(5)
    if way == "backward":
        loss = ens.backward(x, y, sn.EnsembleLoss())
    else:
        ens.schedule = way
        loss = sn.EnsembleLoss()(ens(x), y)
        loss.backward()
    torch.testing.assert_close(loss.detach(), losses.mean().detach())
    shared = dict(oracle.whole.named_parameters())
    compared = 0
    for key, p in ens.network.named_parameters():
        if key in shared and p.grad is not None and p.shape == shared[key].shape:
            torch.testing.assert_close(p.grad, oracle.gradient(key), msg=key)
            compared += 1
    assert compared > 4
    for key, mine in statistics(ens.network).items():
        theirs = torch.stack([net.get_buffer(key) for net in (oracle.whole, *oracle.members)])
        expected = theirs[0] if mine.dim() == theirs.dim() - 1 else theirs[1:]
        torch.testing.assert_close(mine, expected, msg=key)


def test_members_that_divide_a_batch_share_one_run_over_all_of_it() -> None:
    base = randomise(Random()).double()
    ens = apart(sn.convert(base, MEMBERS, layers="last", head="copy", init="preserve")).train()
    x, y = torch.randn(6, 4).double(), torch.randint(3, (6,))
    ens(x)
    found = []
    for way in ("folded", "sequential", 2, "backward"):
        twin = copy.deepcopy(ens)
        torch.manual_seed(3)
        if way == "backward":
            loss = twin.backward(x, y, sn.EnsembleLoss(), split=True)
        else:
            twin.schedule = way
            loss = sn.EnsembleLoss()(twin(x, split=True), y, twin, split=True)
            loss.backward()
        gradients = [p.grad for p in twin.parameters() if p.grad is not None]
        found.append([loss.detach(), *gradients, *statistics(twin.network).values()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    assert all(t == 7 + 2 for n, t in statistics(twin.network).items() if "tracked" in n)


@pytest.mark.parametrize("decided", [True, False])
def test_a_checkpoint_keeps_numbers_and_plan(decided: bool, tmp_path: Path) -> None:
    base, x = randomise(Random()), torch.randn(4, 4)
    made = {"layers": "last", "head": "copy", "init": "preserve"}
    ens = apart(sn.convert(base, MEMBERS, **made))
    if decided:
        train(ens, x, "folded")
    ens.save_pretrained(tmp_path)
    again = sn.load(tmp_path, base=base)
    assert again.plan == ens.plan
    assert (again.plan.prefix is not None) == decided
    live = sn.convert(base, MEMBERS, **made)
    live.load_checkpoint(tmp_path)
    resumed = sn.convert(base, MEMBERS, **made)
    resumed.load_state_dict(ens.state_dict())
    expected = ens.eval()(x)
    for other in (again, live, resumed):
        torch.testing.assert_close(other.eval()(x), expected)
        assert other.plan.prefix == ens.plan.prefix
        assert list(other.state_dict()) == list(ens.state_dict())
        train(other, x, 2)
        assert type(other.network.second) is nn.BatchNorm1d
    again.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(sn.load(tmp_path / "again", base=base).eval()(x), again.eval()(x))


def test_an_optimizer_made_before_the_first_batch_trains_the_plain_norms() -> None:
    ens = sn.convert(randomise(Random()), MEMBERS, layers="last", init="preserve")
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.1))
    before = ens.network.first.weight.detach().clone()
    train(ens, torch.randn(4, 4), "folded")
    optimizer.step()
    assert type(ens.network.first) is nn.BatchNorm1d
    assert not torch.equal(ens.network.first.weight, before)


def test_where_only_members_train_the_shared_norms_stay_as_they_are(tmp_path: Path) -> None:
    base, x = randomise(Random()), torch.randn(4, 4)
    ens = sn.convert(base, MEMBERS, layers="last", init="preserve", train="members")
    before = {k: v.clone() for k, v in base.state_dict().items() if "first" in k or "second" in k}
    for _ in range(2):
        train(ens, x, "folded")
    for key, value in before.items():
        assert torch.equal(ens.network.state_dict()[key], value)
    ens.save_pretrained(tmp_path, shared="never")
    torch.testing.assert_close(sn.load(tmp_path, base=base).eval()(x), ens.eval()(x))


@pytest.mark.slow
def test_files_hold_the_first_part_once(tmp_path: Path) -> None:
    make, layers, inputs = SPLITS["timm ResNet"]
    ens = apart(sn.convert(randomise(make()), MEMBERS, layers=layers, init="preserve"))
    x = inputs()
    train(ens, x, "folded")
    ens.eval()
    program = sn.export_program(ens, x)
    convolutions = [n for n in program.graph.nodes if "conv2d" in str(n.target)]
    rows = [n.meta["val"].shape[0] for n in convolutions]
    one = sum(isinstance(m, nn.Conv2d) for m in ens.network.modules())
    assert len(convolutions) == one
    assert len({str(r) for r in rows}) == 2  # the batch, and the batch for each member
    assert sum(str(r) == str(rows[0]) for r in rows) > one // 2
    expected = ens.predict(x).probs
    torch.testing.assert_close(program.module()(x)["probs"], expected, rtol=1e-3, atol=1e-4)
    sn.export_onnx(ens, tmp_path / "ens.onnx", x)  # which compares it


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("make", [Random, Layers])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "way",
    ["folded", *(pytest.param(w, marks=pytest.mark.slow) for w in (2, "sequential", "backward"))],
)
def test_compiled_networks_run_the_first_part_once(way: str | int, whole: bool, make: Any) -> None:
    torch._dynamo.reset()
    ens = apart(sn.convert(randomise(make()), MEMBERS, layers="last", init="preserve"))
    x = torch.randn(4, 4)
    ens.eval()(x)
    twin = copy.deepcopy(ens)
    one_graph = make is Layers and way in ("folded", 2)
    (ens if whole else ens.network).compile(backend="aot_eager", fullgraph=one_graph)
    seen: list[Tensor] = []
    ens.network.last.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach()))
    train(ens, x, way)
    if not one_graph:  # whose tensors have no values in the hook
        rows = torch.cat(seen)
        torch.testing.assert_close(rows.view(MEMBERS, 4, 6), rows[:4].expand(MEMBERS, 4, 6))
    assert ens.network.first.num_batches_tracked == 7 + 1
    twin.load_state_dict(ens.state_dict())
    torch.testing.assert_close(ens.eval()(x), twin.eval()(x))
    torch._dynamo.reset()


def test_members_that_part_at_the_head_share_all_else() -> None:
    base = randomise(Random())
    ens = sn.convert(base, MEMBERS, layers=[], head="copy", init="preserve")
    x = torch.randn(4, 4)
    for way in ("folded", "sequential", 2, "backward"):
        train(ens, x, way)
    assert ens.plan.prefix == ("stem", "drop", "first", "body", "second", "path", "last")
    assert "before 'head'" in str(ens.report)
    with pytest.raises(DiversityError, match="no norm is converted"):
        sn.Diversity(tau=0.5)(ens)
    assert ens.network.first.num_batches_tracked == 7 + 4


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable. is deprecated")
def test_activation_checkpointing_of_the_block_in_which_members_part() -> None:
    make, layers, inputs = SPLITS["transformers BERT"]
    base = randomise(make())
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ens = apart(sn.convert(base, MEMBERS, layers=layers, init="preserve")).train()
    x, y = inputs(), torch.randint(3, (4,))
    found = []
    for saves in (False, True):
        twin = copy.deepcopy(ens)
        if saves:
            twin.network.gradient_checkpointing_enable({"use_reentrant": False})
        for way in ("folded", "backward"):
            again = copy.deepcopy(twin)
            if way == "folded":
                sn.EnsembleLoss()(again(**x).logits, y).backward()
            else:
                again.backward(x, y, sn.EnsembleLoss())
            found.append({n: p.grad for n, p in again.named_parameters() if p.grad is not None})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, gradient in other.items():
            torch.testing.assert_close(gradient, found[0][key], rtol=1e-4, atol=1e-6, msg=key)

"""Networks that are rebuilt after conversion: right as plain networks, refused by ``save``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.networks import Pictures, Words, dense, randomise
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import sigmanens as sn
from sigmanens.errors import CheckpointError, ConversionError, ExportError, InputError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def untouched() -> Any:
    """Linear, BatchNorm, ReLU, Linear, BatchNorm, ReLU, Linear."""
    torch.manual_seed(0)
    return randomise(dense(True)).eval()


def made() -> sn.SigmaEnsemble:
    return sn.convert(untouched(), 3, init="preserve")


def names(ens: sn.SigmaEnsemble) -> tuple[Any, Any]:
    """A shared Linear, and the heads."""
    network: Any = ens.network
    return network[0], next(iter(ens.member_heads().values())).heads


def old_weight_norm(layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)


def remove(layer: nn.Module) -> None:
    parametrize.remove_parametrizations(layer, "weight")


PARAMETRISED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "weight_norm": (parametrizations.weight_norm, remove, "remove_parametrizations"),
    "spectral_norm": (parametrizations.spectral_norm, remove, "remove_parametrizations"),
    "orthogonal": (parametrizations.orthogonal, remove, "remove_parametrizations"),
    "old weight_norm": (old_weight_norm, nn.utils.remove_weight_norm, "remove_weight_norm"),
    "old spectral_norm": (
        nn.utils.spectral_norm, nn.utils.remove_spectral_norm, "remove_spectral_norm",
    ),
    "pruning": (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.remove(layer, "weight"),
        "prune.remove",
    ),
}  # fmt: skip


def step(ens: sn.SigmaEnsemble) -> None:
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.01))
    sn.EnsembleLoss()(ens.train()(X), torch.arange(6) % 3).backward()
    optimizer.step()
    ens.eval()


@pytest.mark.parametrize("where", ["shared", "heads"])
@pytest.mark.parametrize("name", PARAMETRISED)
def test_parametrised_layers(name: str, where: str, tmp_path: Path) -> None:
    """Members are right, also just after a training step; save asks for plain weights first."""
    change, undo, advice = PARAMETRISED[name]
    ens = made()
    layer, heads = names(ens)
    layers = [layer] if where == "shared" else list(heads)
    for each in layers:
        change(each)
    step(ens)
    expected = ens(X).detach()
    for index in range(3):
        torch.testing.assert_close(ens.member(index)(X), expected[index])
    with pytest.raises(CheckpointError, match=rf"(?s)was changed after.*{advice}"):
        ens.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    if where == "heads" and name != "pruning":
        with pytest.raises(InputError, match="compute their weights from parts"):
            ens.collapse()
    for each in layers:
        undo(each)
    expected = ens(X).detach()
    ens.save_pretrained(tmp_path)
    back = sn.load(tmp_path, untouched())
    torch.testing.assert_close(back(X), expected)
    ens.collapse()


@pytest.mark.parametrize("name", PARAMETRISED)
def test_a_base_that_was_parametrised_keeps_its_layers(name: str, tmp_path: Path) -> None:
    def base() -> nn.Module:
        network = untouched()
        PARAMETRISED[name][0](network[0])
        network(X).sum().backward()  # old hooks keep a computed weight
        return network.eval()

    ens = sn.convert(base(), 2, init="preserve")
    torch.testing.assert_close(ens(X)[1], base()(X))
    ens.save_pretrained(tmp_path)
    assert torch.equal(sn.load(tmp_path, base())(X), ens(X))


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "activation": (lambda n: n.__setitem__(2, nn.GELU()), r"was a .*\.ReLU and is a .*\.GELU"),
    "layer added": (lambda n: n.append(nn.Identity()), r"layer '7', a .*\.Identity, was added"),
    "layer removed": (lambda n: n.pop(2), "was a"),
    "shape": (
        lambda n: n.__setitem__(0, nn.Linear(4, 6, bias=False)),
        "'0.bias', of shape .*, was removed",
    ),
    "one head for all": (lambda n: n.__setitem__(6, nn.Linear(6, 3)), r"is a .*\.Linear"),
    "a head": (
        lambda n: n[6].heads.__setitem__(1, nn.Linear(6, 4)),
        r"'6.heads.1.weight' was of shape \(3, 6\) and is of shape \(4, 6\)",
    ),
    "a norm": (lambda n: n.__setitem__(1, nn.BatchNorm1d(6)), r"is a .*\.BatchNorm"),
    "quantised": (
        lambda n: n.__setitem__(0, torch.ao.nn.quantized.dynamic.Linear(4, 6)),
        "is a torch.ao.nn.quantized.dynamic",
    ),
}


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
@pytest.mark.parametrize("name", CHANGES)
def test_changed_layers_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    ens = made()
    ens.save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    change(ens.network)
    with pytest.raises(CheckpointError, match=message):
        ens.save_pretrained(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_checkpoint_does_not_go_into_a_parametrised_network(tmp_path: Path) -> None:
    ens = made()
    step(ens)
    ens.save_pretrained(tmp_path)
    parametrizations.weight_norm(names(ens)[0])
    with pytest.raises(CheckpointError, match="have changed since conversion"):
        ens.load_checkpoint(tmp_path)


def test_pruned_heads_are_averaged_where_they_have_one_mask() -> None:
    ens = made()
    heads = names(ens)[1]
    for head in heads:
        prune.l1_unstructured(head, "weight", 0.5)
    step(ens)
    plain: Any = ens.collapse()
    plain(X), ens(X)  # computes the weights
    mean = torch.stack([head.weight for head in heads]).mean(0)
    torch.testing.assert_close(plain[6].weight, mean)
    heads[1].weight_mask.copy_(1 - heads[1].weight_mask)
    with pytest.raises(InputError, match="compute their weights from parts"):
        ens.collapse()


def test_a_resized_vocabulary_is_refused(tmp_path: Path) -> None:
    ens = sn.convert(Words(), 2)
    name, table = next(
        (n, m) for n, m in ens.network.named_modules() if isinstance(m, nn.Embedding)
    )
    table.weight = nn.Parameter(torch.zeros(table.num_embeddings + 3, table.embedding_dim))
    with pytest.raises(CheckpointError, match=rf"'{name}.weight' was of shape"):
        ens.save_pretrained(tmp_path)


def test_adapters_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ens = made()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"], r=2), ens.network)
    with pytest.raises(CheckpointError, match="merge_and_unload"):
        ens.save_pretrained(tmp_path)


def test_activation_checkpointing_is_no_change(tmp_path: Path) -> None:
    wrapper = pytest.importorskip(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    ).checkpoint_wrapper
    ens = made()
    network: Any = ens.network
    network[2] = wrapper(network[2])
    ens.save_pretrained(tmp_path)
    assert torch.equal(sn.load(tmp_path, untouched())(X), ens(X))


# -- without values, and traced --------------------------------------------------------------------


def test_networks_without_values_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        base = dense(True)
    for init in ("normal", "preserve", "auto"):
        with pytest.raises(ConversionError, match="meta device and has no values yet"):
            sn.convert(base, 2, init=init)
    ens = made()
    ens.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="meta device and has no values yet"):
        sn.load(tmp_path, base)
    with pytest.raises(CheckpointError, match="lie on the meta device"):
        ens.to("meta").save_pretrained(tmp_path)


def test_leaving_the_meta_device() -> None:
    ens = made()
    expected, state = ens(X), ens.state_dict()
    emptied = copy.deepcopy(ens).to_empty(device="cpu")
    emptied.load_state_dict(state)
    assert torch.equal(emptied(X), expected)
    torch.testing.assert_close(emptied.member(1)(X), expected[1])
    assigned = copy.deepcopy(ens).to("meta")
    assigned.load_state_dict(state, assign=True)
    assert torch.equal(assigned(X), expected)
    with pytest.raises(ConversionError, match="to_empty"):
        assigned.member(1)


@pytest.mark.parametrize("make", [lambda: dense(True), Pictures], ids=["dense", "pictures"])
def test_a_graph_module_is_a_base(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    x = X if make is not Pictures else torch.randn(4, 1, 8, 8)

    def base() -> nn.Module:
        torch.manual_seed(0)
        return torch.fx.symbolic_trace(randomise(make()).eval()).eval()

    ens = sn.convert(base(), 2, init="preserve", head="copy")
    expected = base()(x)
    torch.testing.assert_close(ens(x), expected.expand(2, *expected.shape), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ens.member(1)(x), expected, atol=1e-5, rtol=1e-4)
    ens.save_pretrained(tmp_path)
    assert torch.equal(sn.load(tmp_path, base())(x), ens(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_scripting_is_refused_and_a_member_passes() -> None:
    ens = made()
    for module in (ens, ens.network):
        with pytest.raises(ExportError, match="export_program"):
            torch.jit.script(module)
    plain = ens.member(1)
    torch.testing.assert_close(torch.jit.script(plain)(X), plain(X))


def test_functional_call_uses_the_parameters_it_is_given() -> None:
    ens = made()
    other = copy.deepcopy(ens)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    given: dict[str, Tensor] = dict(other.named_parameters())
    torch.testing.assert_close(torch.func.functional_call(ens, given, (X,)), other(X))

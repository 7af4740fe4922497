"""Code that looks for torch's norms and acts on them does to a converted network what it does to
each member as a plain network."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from tests.backbones import NETWORKS, STATISTICS, flat, logits, statistics
from tests.layers import CASES
from tests.networks import Pictures, apart, dense, randomise
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, update_bn

import sigmanens as sn
from sigmanens.errors import ConversionError, ExportError, InputError, OutsidePassError
from sigmanens.norms import MemberNorm, RunningStatistics

MEMBERS = 3
SCHEDULES = ("folded", "sequential")


def ensemble(name: str, schedule: str = "folded", **options: object) -> sn.SigmaEnsemble:
    base = randomise(NETWORKS[name][0]())
    ens = sn.convert(base, MEMBERS, init="preserve", schedule=schedule, **options)
    return apart(ens)


def compare(ens: sn.SigmaEnsemble, plain: list[nn.Module], x: Tensor) -> None:
    """Results and statistics of the ensemble are those of the plain networks."""
    results = logits(ens(x))
    for m, network in enumerate(plain):
        expected = logits(network(x))
        torch.testing.assert_close(results[m], expected, rtol=1e-3, atol=1e-3)
        for key, value in statistics(network).items():
            got = statistics(ens.network).get(key)
            if got is not None:
                torch.testing.assert_close(got[m], value, rtol=1e-3, atol=1e-3)


def members(ens: sn.SigmaEnsemble) -> list[nn.Module]:
    return [ens.member(m) for m in range(ens.num_members)]


# -- what a converted norm is --------------------------------------------------------------------

ATTRIBUTES = (
    "num_features", "eps", "momentum", "affine", "track_running_stats", "normalized_shape",
    "elementwise_affine", "num_groups", "num_channels", "weight", "bias", *STATISTICS,
)  # fmt: skip


class Holder(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def converted(plain: nn.Module, **options: object) -> MemberNorm:
    return sn.convert(Holder(plain), 2, head="shared", init="preserve", **options).network.norm


@pytest.mark.parametrize("case", CASES)
def test_a_converted_norm_is_one_of_the_class_it_replaces(case: str) -> None:
    plain = CASES[case][0]()
    layer = converted(plain)
    assert isinstance(layer, type(plain))
    assert type(layer).__name__ == f"Sigma{type(plain).__name__}"
    assert [a for a in ATTRIBUTES if hasattr(plain, a) and not hasattr(layer, a)] == []
    for key in ("num_features", "eps", "momentum", "normalized_shape", "num_groups"):
        if hasattr(plain, key):
            assert getattr(layer, key) == getattr(plain, key)
    for key in ("affine", "elementwise_affine"):
        assert getattr(layer, key, True)
    own = {"scale_logit", "carrier", "offset", "shift", *STATISTICS}
    assert {k for k in layer.state_dict() if "." not in k} <= own
    for twin in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        assert twin.state_dict().keys() == layer.state_dict().keys()


def test_a_kept_batch_norm_is_one_too() -> None:
    layer = sn.convert(dense(), 2, layers=["4"]).network[1]
    assert isinstance(layer, nn.BatchNorm1d)
    assert type(layer).__name__ == "MemberBatchNorm1d"
    assert set(layer.state_dict()) == {"weight", "bias", *STATISTICS}


def test_one_class_for_a_pair_of_classes() -> None:
    ens = sn.convert(dense(), 2)
    assert type(ens.network[1]) is type(ens.network[4])
    assert type(ens.network[1]) is not type(sn.convert(dense(False), 2).network[1])


def test_a_class_that_nothing_can_be_derived_from_gives_its_base() -> None:
    class Last(nn.LayerNorm):
        def __init_subclass__(cls) -> None:
            raise TypeError("this class is the last")

    layer = converted(Last(4))
    assert isinstance(layer, nn.LayerNorm)
    assert not isinstance(layer, Last)


def test_an_ensemble_survives_saving_as_a_whole(tmp_path: object) -> None:
    ens = ensemble("dense").eval()
    x = flat()
    torch.save(ens, f"{tmp_path}/ens.pt")
    again = torch.load(f"{tmp_path}/ens.pt", weights_only=False)
    torch.testing.assert_close(again(x), ens(x))


def test_a_state_without_counts_is_not_taken_for_complete() -> None:
    ens = ensemble("dense")
    state = {k: v for k, v in ens.state_dict().items() if "num_batches" not in k}
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        ens.load_state_dict(state)


# -- statistics estimated anew, averaged weights -------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NETWORKS)
def test_update_bn_estimates_each_members_statistics(name: str, schedule: str) -> None:
    ens = ensemble(name, schedule)
    momenta = [m.momentum for m in ens.modules() if isinstance(m, _BatchNorm)]
    plain = members(ens)
    loader = [(NETWORKS[name][1](), 0) for _ in range(3)]
    for network in (ens, *plain):
        update_bn(loader, network)
    assert momenta == [m.momentum for m in ens.modules() if isinstance(m, _BatchNorm)]
    compare(ens.eval(), [n.eval() for n in plain], NETWORKS[name][1]())


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_weights_and_statistics(use_buffers: bool) -> None:
    ens = ensemble("dense").train()
    averaged = AveragedModel(ens, use_buffers=use_buffers)
    seen = []
    for _ in range(3):
        ens(flat())
        with torch.no_grad():
            ens.network[1].scale_logit.add_(0.3)
        averaged.update_parameters(ens)
        seen.append({k: v.clone() for k, v in ens.state_dict().items()})
    for key in ("network.1.scale_logit", "network.1.running_mean"):
        values = torch.stack([s[key] for s in seen])
        expected = values.mean(0) if use_buffers or "scale" in key else values.new_zeros(())
        if use_buffers or "scale" in key:
            torch.testing.assert_close(averaged.module.state_dict()[key], expected)
    loader = [(flat(), 0) for _ in range(2)]
    plain = [averaged.module.member(m) for m in range(MEMBERS)]
    for network in (averaged, *plain):
        update_bn(loader, network)
    compare(averaged.module.eval(), [n.eval() for n in plain], flat())


def test_moving_average_of_timm() -> None:
    ema = pytest.importorskip("timm.utils").ModelEmaV3
    ens = ensemble("timm").train()
    average = ema(ens, decay=0.5)
    before = ens.network.bn1.running_mean.clone()
    ens(NETWORKS["timm"][1]())
    average.update(ens)
    got = average.module.network.bn1
    torch.testing.assert_close(got.running_mean, (before + ens.network.bn1.running_mean) / 2)
    assert isinstance(got, _BatchNorm)


def test_reset_running_stats() -> None:
    ens = ensemble("dense")
    ens.network[1].reset_running_stats()
    assert ens.network[1].running_mean.abs().sum() == 0
    assert bool((ens.network[1].running_var == 1).all())
    assert ens.network[1].num_batches_tracked.tolist() == [0] * MEMBERS


# -- freezing ------------------------------------------------------------------------------------


def evaluated(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def without_momentum(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 0.0


def untracked(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False


def finetuned(train_bn: bool) -> Callable[[nn.Module], None]:
    def freeze(network: nn.Module) -> None:
        finetuning = pytest.importorskip("lightning.pytorch.callbacks").BaseFinetuning
        finetuning.freeze(network, train_bn=train_bn)

    return freeze


def by_timm(network: nn.Module) -> None:
    pytest.importorskip("timm.utils").freeze(network)


class FrozenBatchNorm2d(nn.Module):
    """As detectron2 and others have it."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features, self.eps = num_features, 1e-5
        for key, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            self.register_buffer(key, torch.full((num_features,), float(value)))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        if isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm)):
            new = cls(module.num_features)
            new.weight.data = module.weight.data.clone().detach()
            new.bias.data = module.bias.data.clone().detach()
            new.running_mean.data = module.running_mean.data
            new.running_var.data = module.running_var.data
            new.eps = module.eps
            return new
        for name, child in module.named_children():
            new = cls.convert(child)
            if new is not child:
                module.add_module(name, new)
        return module


FREEZING: dict[str, Callable[[nn.Module], object]] = {
    "eval": evaluated,
    "momentum": without_momentum,
    "untracked": untracked,
    "lightning": finetuned(False),
    "lightning, train_bn": finetuned(True),
    "timm": by_timm,
    "detectron2": FrozenBatchNorm2d.convert,
}


@pytest.mark.parametrize("before", [False, True], ids=["after conversion", "before"])
@pytest.mark.parametrize("how", FREEZING)
@pytest.mark.parametrize("name", ["pictures", "timm"])
def test_freezing_is_that_of_the_plain_members(name: str, how: str, before: bool) -> None:
    if how == "detectron2" and name == "timm":
        pytest.skip("it would leave out the activations of timm's norms")
    base = randomise(NETWORKS[name][0]()).train()
    if before:
        FREEZING[how](base)
    ens = apart(sn.convert(base, MEMBERS, init="preserve", schedule="folded", head="copy"))
    plain = members(ens)
    if not before:
        for network in (ens.network, *plain):
            FREEZING[how](network)
    start = {k: v.clone() for k, v in statistics(ens.network).items()}
    for _ in range(2):
        compare(ens, plain, NETWORKS[name][1]())
    if how != "lightning, train_bn":
        now = statistics(ens.network)
        assert all(torch.equal(v, now[k]) for k, v in start.items() if "num_batches" not in k)
    theirs = {m.training for m in plain[0].modules() if isinstance(m, _BatchNorm)}
    ours = {m.training for m in ens.network.modules() if isinstance(m, _BatchNorm)}
    assert ours == theirs
    again = members(ens)
    compare(ens.eval(), [n.eval() for n in again], NETWORKS[name][1]())
    for key, value in plain[1].named_parameters():
        assert dict(again[1].named_parameters())[key].shape == value.shape


@pytest.mark.parametrize("name", ["timm", "pictures"])
def test_what_timm_freezes_it_can_thaw(name: str) -> None:
    utils = pytest.importorskip("timm.utils")
    ens = ensemble(name).train()
    keys = list(ens.state_dict())
    utils.freeze(ens.network, ["bn1", "conv1"])
    layer = ens.network.bn1
    assert type(layer).__name__.startswith("SigmaFrozenBatchNorm")
    assert str(layer).startswith(f"{type(layer).__name__}((")
    assert not layer.scale_logit.requires_grad
    assert not ens.train().network.bn1.training
    ens.freeze_statistics().freeze_statistics(False)
    assert not layer.training
    assert type(ens.member(0).bn1).__name__.startswith("FrozenBatchNorm")
    assert list(ens.state_dict()) == keys
    utils.unfreeze(ens.network, ["bn1", "conv1"])
    assert ens.network.bn1 is layer
    assert isinstance(layer, nn.BatchNorm2d)
    assert layer.scale_logit.requires_grad
    assert list(ens.state_dict()) == keys
    plain = members(ens.train())
    compare(ens, plain, NETWORKS[name][1]())


def test_freezing_a_part_leaves_the_rest_alone() -> None:
    utils = pytest.importorskip("timm.utils")
    ens = ensemble("timm").train()
    utils.freeze(ens.network, ["bn1"])
    start = {k: v.clone() for k, v in statistics(ens.network).items()}
    ens(NETWORKS["timm"][1]())
    now = statistics(ens.network)
    moved = {k.split(".")[0] for k in now if not torch.equal(now[k], start[k])}
    assert "bn1" not in moved
    assert moved >= {"layer1", "layer4"}


# -- synchronised --------------------------------------------------------------------------------


def sync(network: nn.Module) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(network)


def sync_by_timm(network: nn.Module) -> nn.Module:
    return pytest.importorskip("timm.layers").convert_sync_batchnorm(network)


class AnyBatchNorm(_BatchNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        pass


def revert(network: nn.Module) -> nn.Module:
    """As Lightning and mmcv have it."""
    new = network
    if isinstance(network, nn.SyncBatchNorm):
        new = AnyBatchNorm(network.num_features, network.eps, network.momentum)
        with torch.no_grad():
            new.weight, new.bias = network.weight, network.bias
        for key in STATISTICS:
            setattr(new, key, getattr(network, key))
        new.training = network.training
    for name, child in network.named_children():
        new.add_module(name, revert(child))
    return new


@pytest.mark.parametrize("convert", [sync, sync_by_timm])
@pytest.mark.parametrize("name", ["dense", "pictures", "timm"])
def test_converting_to_synchronised_statistics_afterwards(
    name: str, convert: Callable[[nn.Module], nn.Module]
) -> None:
    ens = ensemble(name).train()
    plain = members(ens)
    keys, parameters = list(ens.state_dict()), list(ens.parameters())
    assert convert(ens) is ens
    layers = [m for m in ens.network.modules() if isinstance(m, RunningStatistics)]
    assert all(isinstance(m, nn.SyncBatchNorm) and m.synchronised for m in layers)
    assert list(ens.state_dict()) == keys
    assert all(a is b for a, b in zip(ens.parameters(), parameters, strict=True))
    compare(ens, plain, NETWORKS[name][1]())
    compare(ens, members(ens), NETWORKS[name][1]())
    kinds = {type(m) for m in ens.member(0).modules() if isinstance(m, _BatchNorm)}
    if name != "timm" or convert is sync_by_timm:  # else activations would be left out
        assert all(issubclass(k, nn.SyncBatchNorm) for k in kinds)
    revert(ens)
    assert not any(m.synchronised or isinstance(m, nn.SyncBatchNorm) for m in layers)
    compare(ens, members(ens), NETWORKS[name][1]())


def test_a_kept_batch_norm_is_synchronised_too() -> None:
    ens = sync(ensemble("dense", layers=["4"]))
    assert isinstance(ens.network[1], nn.SyncBatchNorm)
    assert ens.network[1].synchronised


# -- other replacements --------------------------------------------------------------------------


class Fast(nn.Module):
    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.register_buffer("weight", old.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_module_built_from_the_members_values_does_not_replace_them(batch_norm: bool) -> None:
    ens = sn.convert(dense(batch_norm), 2)
    with pytest.raises(ConversionError, match=r"layer '1' has values of 2 members, which the Fast"):
        ens.network[1] = Fast(ens.network[1])
    assert isinstance(ens.network[1], MemberNorm)


def test_a_norm_can_be_taken_out() -> None:
    ens = sn.convert(dense(), 2)
    ens.network[1] = nn.Identity()
    assert type(ens.network[1]) is nn.Identity


def test_copying_into_a_plain_norm_names_the_layer() -> None:
    ens = sn.convert(Pictures(), 2, init="preserve")
    frozen = FrozenBatchNorm2d(8)
    with pytest.raises(InputError, match=r"\(2, 8\) does not fit into \(8,\): .* layer 'bn1'"):
        frozen.weight.data.copy_(ens.network.bn1.weight)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_fusing_with_a_convolution_fails_and_changes_nothing() -> None:
    ens = sn.convert(Pictures(), 2, init="preserve").eval()
    before = {k: v.clone() for k, v in ens.state_dict().items()}
    net = ens.network
    with pytest.raises(ConversionError, match=r"fusion would take the weight .* layer 'bn1'"):
        torch.nn.utils.fusion.fuse_conv_bn_eval(net.conv1, net.bn1)
    with pytest.raises(ConversionError, match=r"weight_norm would .*: ens\.member\(i\)"):
        torch.nn.utils.weight_norm(net.bn1)
    with pytest.raises(AssertionError, match="SigmaBatchNorm2d"):
        torch.ao.quantization.fuse_modules(net, [["conv1", "bn1"]], inplace=True)
    assert ens.state_dict().keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in ens.state_dict().items())


@pytest.mark.parametrize("inner", [False, True], ids=["ensemble", "within another network"])
def test_a_symbolic_trace_says_what_to_do_instead(inner: bool) -> None:
    ens = sn.convert(Pictures(), 2).eval()
    with pytest.raises(ExportError, match=r"export_program\(ens, example\), or trace one member"):
        torch.fx.symbolic_trace(Holder(ens) if inner else ens)
    with pytest.raises(OutsidePassError, match=r"ens\.member\(m\)"):
        torch.fx.symbolic_trace(ens.network)
    torch.fx.symbolic_trace(ens.member(0))


def test_weight_decay_leaves_out_the_norms() -> None:
    names = pytest.importorskip("transformers.trainer_pt_utils").get_parameter_names
    ens = sn.convert(dense(batch_norm=False), 2, head="shared")
    decayed = names(ens.network, [nn.LayerNorm])
    assert decayed
    assert not any("scale_logit" in n for n in decayed)

"""Which norms are regularised: the paper's rules on real architectures, and one's own choice."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.conversion.blocks import select
from sigmanens.ensemble.ensemble import as_ensemble
from sigmanens.errors import DiversityError, InputError

SECOND = "block of two norms: the second"
FIRST = "wide block of two norms: the first"
ENDS = "block of three norms: first and last"
FEED_FORWARD = "transformer: norm of each feed-forward block"
ALL = "all norms (no known block)"


def auto(model: nn.Module, **options: Any) -> tuple[str, list[str]]:
    """The rule and the names that "auto" picks, which are the ones in the report."""
    ensemble = sn.convert(model, 2, head="shared", init="normal", **options)
    rule, names = sn.Diversity().chosen(ensemble)
    assert (rule, tuple(names)) == (
        ensemble.report.regularised_rule,
        ensemble.report.regularised,
    )
    return rule, names


def matching(model: nn.Module, pattern: str) -> list[str]:
    """Names of modules that match a pattern as a whole, in order."""
    return [n for n, _ in model.named_modules() if re.fullmatch(pattern, n)]


# -- convolutional networks ----------------------------------------------------------------------


class Basic(nn.Module):
    def __init__(self, norm: str = "bn", norms: int = 2) -> None:
        super().__init__()
        for i in range(1, norms + 1):
            self.add_module(f"conv{i}", nn.Conv2d(4, 4, 1))
            self.add_module(f"{norm}{i}", nn.BatchNorm2d(4))
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))


class WideBasic(Basic):
    pass


class ResNet(nn.Module):
    """Stem ``bn1``, two numbered blocks, and a norm at the end that looks like a block's."""

    def __init__(self, block: Callable[[], nn.Module] = Basic) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(block(), block())
        self.bn2 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)


def test_basic_blocks_give_their_second_norm() -> None:
    assert auto(ResNet()) == (SECOND, ["layer1.0.bn2", "layer1.1.bn2"])


def test_wide_blocks_give_their_first_norm() -> None:
    assert auto(ResNet(WideBasic)) == (FIRST, ["layer1.0.bn1", "layer1.1.bn1"])


def test_bottlenecks_give_their_first_and_last_norm() -> None:
    expected = ["layer1.0.bn1", "layer1.0.bn3", "layer1.1.bn1", "layer1.1.bn3"]
    assert auto(ResNet(lambda: Basic(norms=3))) == (ENDS, expected)


def test_norms_called_norm_count_beside_convolutions() -> None:
    rule, names = auto(ResNet(lambda: Basic("norm")))
    assert (rule, names) == (SECOND, ["layer1.0.norm2", "layer1.1.norm2"])
    rule, names = auto(ResNet(lambda: Basic("norm", 3)))
    assert rule == ENDS
    assert names == matching(ResNet(lambda: Basic("norm", 3)), r"layer1\.\d\.norm[13]")


def test_mixed_blocks_follow_each_their_own_rule() -> None:
    kinds = iter([2, 3])
    rule, names = auto(ResNet(lambda: Basic(norms=next(kinds))))
    assert rule == f"{ENDS} + {SECOND}"
    assert names == ["layer1.0.bn2", "layer1.1.bn1", "layer1.1.bn3"]


def test_a_network_within_a_network_is_recognised() -> None:
    # Neither the stem's bn1 nor the bn2 at the end becomes a block's.
    model = nn.Sequential()
    model.add_module("backbone", ResNet())
    assert auto(model) == (SECOND, ["backbone.layer1.0.bn2", "backbone.layer1.1.bn2"])


def test_the_rule_is_by_block_even_if_some_of_its_norms_are_kept() -> None:
    bottlenecks = ResNet(lambda: Basic(norms=3))
    assert auto(bottlenecks, layers=r"layer1\.\d\.bn[12]") == (
        ENDS,
        ["layer1.0.bn1", "layer1.1.bn1"],
    )


def test_where_the_rule_picks_only_kept_norms_all_converted_ones_are_taken() -> None:
    assert auto(ResNet(), layers="bn1$")[1] == ["bn1", "layer1.0.bn1", "layer1.1.bn1"]


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "wide_resnet50_2"])
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_resnets_of_libraries(library: str, name: str) -> None:
    if library == "timm":
        model = pytest.importorskip("timm").create_model(name)
    else:
        model = getattr(pytest.importorskip("torchvision").models, name)(weights=None)
    basic = name == "resnet18"
    expected = matching(model, r"layer\d\.\d\.bn2" if basic else r"layer\d\.\d\.bn[13]")
    assert len(expected) == (8 if basic else 32)
    assert auto(model) == (SECOND if basic else ENDS, expected)


@pytest.mark.parametrize(
    ("name", "rule", "pattern"),
    [
        ("resnet8", SECOND, r"layer\d\.\d\.bn2"),
        ("resnet18", SECOND, r"layer\d\.\d\.bn2"),
        ("resnet50", ENDS, r"layer\d\.\d\.bn[13]"),
        ("wrn28_10", FIRST, r"layer\d\.\d\.bn1"),
    ],
)
def test_backbones_of_the_lab(name: str, rule: str, pattern: str) -> None:
    backbones = pytest.importorskip("sigmanens.lab.backbones")
    model = backbones.build_backbone(name, num_classes=10)
    assert auto(model) == (rule, matching(model, pattern))


class Named(nn.Module):
    """Holds norms under the given dotted names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            parent: nn.Module = self
            *above, leaf = name.split(".")
            for part in above:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.add_module(leaf, nn.LayerNorm(2))


@pytest.mark.parametrize(
    "names",
    [
        ("stem.norm1", "stem.norm2", "stages.0.norm"),
        ("norm2",),
        ("head.ln_2", "final_layer_norm", "encoder.final_layer_norm"),
        ("output.LayerNorm", "pooler.output.LayerNorm"),
        ("stages.0.mlp.norm2", "stages.0.attention.output.LayerNorm"),
        ("bn1", "bn2", "stem.bn1", "stem.bn2"),
        ("blocks.0.bn1", "blocks.1.bn1"),
        ("mixer1.norm1", "mixer1.norm2"),
    ],
    ids=str,
)
def test_norms_outside_known_blocks_are_all_taken(names: tuple[str, ...]) -> None:
    assert auto(Named(*names)) == (ALL, list(names))


def test_a_stem_beside_known_blocks_is_left_alone() -> None:
    model = Named("stem.norm2", "blocks.0.norm1", "blocks.0.norm2", "norm2")
    assert auto(model) == (FEED_FORWARD, ["blocks.0.norm2"])


def test_residual_and_transformer_blocks_may_be_in_one_network() -> None:
    model = nn.ModuleDict({"cnn": ResNet(), "vit": Named("blocks.0.norm1", "blocks.0.norm2")})
    rule, names = auto(model)
    assert rule == f"{SECOND} + {FEED_FORWARD}"
    assert names == ["cnn.layer1.0.bn2", "cnn.layer1.1.bn2", "vit.blocks.0.norm2"]


def test_networks_without_known_blocks_take_all_norms() -> None:
    model = pytest.importorskip("torchvision").models.mobilenet_v2(weights=None)
    rule, names = auto(model)
    assert rule == ALL
    assert names == [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]


# -- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_of_torch(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    assert auto(model) == (FEED_FORWARD, ["layers.0.norm2", "layers.1.norm2"])


def test_decoder_of_torch() -> None:
    model = nn.Transformer(8, 2, 1, 2, 16, batch_first=True)
    expected = ["encoder.layers.0.norm2", "decoder.layers.0.norm3", "decoder.layers.1.norm3"]
    assert auto(model) == (FEED_FORWARD, expected)


def test_vit_of_torchvision() -> None:
    models = pytest.importorskip("torchvision").models
    model = models.VisionTransformer(8, 4, 2, 2, 8, 16)
    expected = [f"encoder.layers.encoder_layer_{i}.ln_2" for i in range(2)]
    assert auto(model) == (FEED_FORWARD, expected)


def test_swin_of_torchvision() -> None:
    models = pytest.importorskip("torchvision").models
    model = models.SwinTransformer([2, 2], 8, [1, 1], [1, 1], [2, 2])
    assert auto(model) == (FEED_FORWARD, matching(model, r"features\.\d\.\d\.norm2"))


@pytest.mark.parametrize("name", ["test_vit", "test_vit2", "test_vit3", "test_vit_relpos"])
def test_vit_of_timm(name: str) -> None:
    model = pytest.importorskip("timm").create_model(name)
    expected = matching(model, r"blocks\.\d+\.norm2")
    assert len(expected) == len(model.blocks)
    assert auto(model) == (FEED_FORWARD, expected)


SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
}
WORDS = {"vocab_size": 32, "max_position_embeddings": 16, "pad_token_id": 0}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
PICTURES = {"image_size": 8, "patch_size": 4}
BART = {
    "d_model": 8,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "forced_eos_token_id": None,
}

# family, head class suffix, configuration, the norms of feed-forward blocks
HUGGING_FACE = [
    ("ViT", "ImageClassification", SIZES | PICTURES, r".*layers?\.\d\.layernorm_after"),
    ("DeiT", "ImageClassification", SIZES | PICTURES, r".*layers?\.\d\.layernorm_after"),
    ("Dinov2", "ImageClassification", SIZES | PICTURES, r".*layers?\.\d\.norm2"),
    ("Bert", "SequenceClassification", SIZES | WORDS, r".*layer\.\d\.output\.LayerNorm"),
    ("Roberta", "SequenceClassification", SIZES | WORDS, r".*layer\.\d\.output\.LayerNorm"),
    ("Electra", "SequenceClassification", SIZES | WORDS, r".*layer\.\d\.output\.LayerNorm"),
    (
        "DistilBert",
        "SequenceClassification",
        WORDS | {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16},
        r".*layer\.\d\.output_layer_norm",
    ),
    ("Llama", "SequenceClassification", SIZES | WORDS, r".*\.\d\.post_attention_layernorm"),
    ("Qwen2", "SequenceClassification", SIZES | WORDS, r".*\.\d\.post_attention_layernorm"),
    (
        "GPT2",
        "SequenceClassification",
        TOKENS | {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2},
        r"transformer\.h\.\d\.ln_2",
    ),
    ("GPTNeoX", "SequenceClassification", SIZES | WORDS, r".*\.\d\.post_attention_layernorm"),
    ("Bart", "SequenceClassification", WORDS | BART, r".*layers\.\d\.final_layer_norm"),
    ("Gemma2", "SequenceClassification", SIZES | WORDS, r".*\.\d\.pre_feedforward_layernorm"),
]


@pytest.mark.parametrize(
    ("family", "task", "options", "pattern"), HUGGING_FACE, ids=[c[0] for c in HUGGING_FACE]
)
def test_transformers(family: str, task: str, options: dict[str, Any], pattern: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}For{task}")(config)
    expected = matching(model, pattern)
    assert len(expected) == (3 if family == "Bart" else 2)
    if any(type(m).__name__.endswith("RMSNorm") for m in model.modules()):
        # Classes without a rule of their own: by names alone.
        assert select(model, _norms(model), "auto") == (FEED_FORWARD, expected)
    else:
        assert auto(model) == (FEED_FORWARD, expected)


def _norms(model: nn.Module) -> dict[str, Any]:
    """Every norm by name, as if it were converted."""
    return {n: m for n, m in model.named_modules() if "norm" in n.rpartition(".")[2]}


# -- one's own choice ----------------------------------------------------------------------------


@pytest.fixture
def ensemble() -> sn.SigmaEnsemble:
    return sn.convert(ResNet(), 2, head="shared")


NAMES = [
    "bn1",
    *(f"layer1.{i}.{n}" for i in (0, 1) for n in ("bn1", "bn2", "shortcut.1")),
    "bn2",
]


@pytest.mark.parametrize(
    ("layers", "rule", "expected"),
    [
        ("all", "all norms", NAMES),
        (None, "all norms", NAMES),
        (r"layer1\.1", "given", NAMES[4:7]),
        (r"^bn", "given", ["bn1", "bn2"]),
        (["bn2", "layer1.0.bn1"], "given", ["layer1.0.bn1", "bn2"]),
        (("bn1",), "given", ["bn1"]),
        (
            lambda name, layer: layer.logit.shape == (2, 4) and "short" in name,
            "given",
            NAMES[3:7:3],
        ),
    ],
    ids=["all", "None", "regex", "anchored regex", "list", "tuple", "callable"],
)
def test_own_choice(
    ensemble: sn.SigmaEnsemble, layers: Any, rule: str, expected: list[str]
) -> None:
    assert list(ensemble.sigma_norms()) == NAMES
    assert sn.Diversity(layers=layers).chosen(ensemble) == (rule, expected)


def test_the_callable_gets_the_converted_layer(ensemble: sn.SigmaEnsemble) -> None:
    seen: dict[str, nn.Module] = {}
    sn.Diversity(layers=lambda n, m: bool(seen.update({n: m})) or True).chosen(ensemble)
    assert seen == ensemble.sigma_norms()


def test_unknown_names_are_an_error_that_lists_the_known(ensemble: sn.SigmaEnsemble) -> None:
    with pytest.raises(DiversityError) as caught:
        sn.Diversity(layers=["bn1", "bn9", "fc"])(ensemble)
    assert "names 'bn9', 'fc': no converted norm" in str(caught.value)
    assert "the 8 converted norms are bn1, layer1.0.bn1" in str(caught.value)


@pytest.mark.parametrize("layers", ["stage7", [], lambda name, layer: False])
def test_a_choice_of_nothing_is_an_error(ensemble: sn.SigmaEnsemble, layers: Any) -> None:
    with pytest.raises(DiversityError, match=r"selects no converted norm; the 8 converted norms"):
        sn.Diversity(layers=layers)(ensemble)


def test_long_lists_of_norms_are_cut() -> None:
    model = nn.Sequential(*(nn.LayerNorm(2) for _ in range(15)))
    with pytest.raises(DiversityError, match=r"the 15 converted norms are 0, 1, .* 11 and 3 more$"):
        sn.Diversity(layers="x")(sn.convert(model, 2, head="shared"))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("layer(", "no valid regular expression"),
        (3, "layers is 3"),
        ([1, 2], r"layers is \[1, 2\]"),
    ],
)
def test_no_selector_at_all_is_named(ensemble: sn.SigmaEnsemble, layers: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sn.Diversity(layers=layers)(ensemble)


def test_a_tied_norm_may_be_named_by_any_of_its_names_and_counts_once() -> None:
    norm = nn.LayerNorm(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.LayerNorm(4))
    ensemble = sn.convert(model, 2, head="shared")
    for layers in (["1"], ["3"], ["1", "3"], "^3$", lambda n, m: n == "3"):
        assert sn.Diversity(layers=layers).chosen(ensemble) == ("given", ["1"])
    assert sn.Diversity(layers=ensemble.report.converted).chosen(ensemble)[1] == ["1", "4"]


def test_a_root_norm_is_chosen() -> None:
    ensemble = sn.convert(nn.LayerNorm(4), 2, head="shared")
    assert sn.Diversity().chosen(ensemble) == (ALL, [""])
    with pytest.raises(DiversityError, match=r"the 1 converted norms are \(root\)"):
        sn.Diversity(layers="x")(ensemble)


# -- finding the ensemble ------------------------------------------------------------------------


def test_the_ensemble_is_found_within_wrappers(ensemble: sn.SigmaEnsemble) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    assert as_ensemble(ensemble) is ensemble
    assert as_ensemble(Wrapper(ensemble)) is ensemble
    assert as_ensemble(torch.compile(ensemble, backend="eager")) is ensemble


@pytest.mark.parametrize("thing", [None, nn.Linear(2, 2), Tensor(), nn.Sequential()], ids=type)
def test_something_else_is_named(thing: object) -> None:
    with pytest.raises(InputError, match=f"got a {type(thing).__name__} in the place of the ensem"):
        as_ensemble(thing)

"""Parameter counts of the paper's ensembles (arXiv 2607.23860), through conversion itself."""

from __future__ import annotations

import pytest

import sigmanens as sn
from sigmanens.lab.backbones import build_backbone


@pytest.mark.parametrize(
    ("name", "options", "low", "high"),
    [
        ("resnet18", {"num_classes": 10}, 11.195, 11.205),
        ("resnet18", {"num_classes": 100}, 11.385, 11.395),
        ("resnet50", {"num_classes": 100}, 24.37, 24.39),
        ("wrn28_10", {"num_classes": 100, "conv_bias": True}, 36.757, 36.762),
        ("wrn28_10", {"num_classes": 100, "conv_bias": False}, 36.747, 36.752),
    ],
)
def test_four_members_without_shift_and_with_fresh_heads(name, options, low, high):
    base = build_backbone(name, **options)
    ensemble = sn.convert(base, members=4, init="normal", head="fresh")
    millions = round(sum(p.numel() for p in ensemble.parameters()) / 1e6, 3)
    assert low <= millions <= high
    assert ensemble.report.base_parameters == sum(p.numel() for p in base.parameters())


@pytest.mark.parametrize(
    ("name", "rule", "count"),
    [
        ("resnet18", "second", 8),
        ("resnet50", "first and", 32),
        ("wrn28_10", "first", 12),
    ],
)
def test_the_papers_rule_picks_the_norms_it_names(name, rule, count):
    base = build_backbone(name)
    report = sn.convert(base, members=2, init="normal", head="fresh").report
    assert len(report.regularised) == count
    assert rule in report.regularised_rule

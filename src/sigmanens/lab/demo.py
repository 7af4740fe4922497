"""``sigmanens demo``: in two minutes, what the method does, on real data that needs no download.

Few handwritten digits, seen through noise, so that one network is over-confident; then one network,
four separate ones, the FiLM-Ensemble control, no penalty, and σN-Ens at several τ.
"""

from __future__ import annotations

from sigmanens.conversion.config import ConversionConfig
from sigmanens.lab.bench.config import BenchConfig, MeasureConfig
from sigmanens.lab.config import DataConfig, DemoConfig, DiversityConfig, ModelConfig, Recipe


def demo_study(config: DemoConfig) -> BenchConfig:
    """The demo as a study of ``sigmanens bench``.

    Raises:
        ConfigError: for a size that the demo cannot run with.
    """
    config.check()
    return BenchConfig(
        study="digits-demo",
        data=DataConfig(source="digits", limit=config.train),
        model=ModelConfig("digits", {"width": config.width}),
        ensemble=ConversionConfig(members=config.members, head="fresh", init="normal"),
        diversity=DiversityConfig(weight=config.weight),
        recipe=Recipe(epochs=config.epochs, batch_size=50, lr=0.3, weight_decay=0.0),
        methods=["separate", "film", "sigmanens_lambda0", "sigmanens"],
        taus=list(config.taus),
        seeds=list(range(config.seeds)),
        measure=MeasureConfig(detailed_seeds=None, features=False, watched=0, resamples=200),
        workers=config.workers,
    )

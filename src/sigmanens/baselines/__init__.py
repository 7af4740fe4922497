"""The rivals, behind one interface: ``forward`` gives (M, B, C), ``num_members`` is M."""

from sigmanens.baselines.batch_ensemble import batchensemble
from sigmanens.baselines.dropout import mc_dropout
from sigmanens.baselines.film import film_ensemble
from sigmanens.baselines.last_layer import laplace
from sigmanens.baselines.lora import lora_ensemble
from sigmanens.baselines.masked_ensemble import masksembles
from sigmanens.baselines.masks import fixed_masks
from sigmanens.baselines.multi_input import mimo
from sigmanens.baselines.packed_ensemble import packed
from sigmanens.baselines.parallel_heads import heads_only
from sigmanens.baselines.separate import SeparateNetworks
from sigmanens.baselines.tuning import norm_tuning

__all__ = [
    "SeparateNetworks",
    "batchensemble",
    "film_ensemble",
    "fixed_masks",
    "heads_only",
    "laplace",
    "lora_ensemble",
    "masksembles",
    "mc_dropout",
    "mimo",
    "norm_tuning",
    "packed",
]

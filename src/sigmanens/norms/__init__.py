r"""σNorm layers: one shared normalisation, one scale vector per member (arXiv 2607.23860).

.. math:: y_{m} = s_m \odot \mathrm{norm}_m(x) + b_m

:mod:`~sigmanens.norms.scales` holds the scales and shifts, :mod:`~sigmanens.norms.inits` their
initial values; the other modules hold one family of norms each.
"""

from sigmanens.norms.batchnorm import (
    MemberBatchNorm,
    RunningStatistics,
    SigmaBatchNorm,
    SigmaInstanceNorm,
)
from sigmanens.norms.samplewise import (
    SigmaChannelsFirstLayerNorm,
    SigmaGroupNorm,
    SigmaLayerNorm,
    SigmaRMSNorm,
)
from sigmanens.norms.scales import Affine, MemberNorm, SigmaNorm
from sigmanens.norms.wrapped import SigmaWrappedNorm

__all__ = [
    "Affine",
    "MemberBatchNorm",
    "MemberNorm",
    "RunningStatistics",
    "SigmaBatchNorm",
    "SigmaChannelsFirstLayerNorm",
    "SigmaGroupNorm",
    "SigmaInstanceNorm",
    "SigmaLayerNorm",
    "SigmaNorm",
    "SigmaRMSNorm",
    "SigmaWrappedNorm",
]

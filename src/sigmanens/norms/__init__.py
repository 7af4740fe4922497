r"""σNorm layers: one shared normalisation, one scale vector per member (arXiv 2607.23860).

.. math:: y_{m} = s_m \odot \mathrm{norm}_m(x) + b_m

Scales, initial values, and one family of norms a module. To other code a converted norm is one of
the class it replaces.
"""

from sigmanens.norms.batchnorm import (
    MemberBatchNorm,
    RunningStatistics,
    SigmaBatchNorm,
    SigmaInstanceNorm,
)
from sigmanens.norms.member import MemberNorm
from sigmanens.norms.replacing import become
from sigmanens.norms.samplewise import (
    SigmaChannelsFirstLayerNorm,
    SigmaGroupNorm,
    SigmaLayerNorm,
    SigmaRMSNorm,
)
from sigmanens.norms.scales import Affine, SigmaNorm
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
    "become",
]

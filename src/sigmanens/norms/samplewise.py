"""σNorms that normalise sample by sample: LayerNorm, RMSNorm, GroupNorm and their kin."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import InputError
from sigmanens.norms.scales import Affine, SigmaNorm
from sigmanens.passes.context import MemberAxis


class _Samplewise(SigmaNorm):
    """σNorm that takes over the named settings of its source."""

    settings: tuple[str, ...] = ("eps",)
    eps: float

    def __init__(
        self, source: nn.Module, axis: MemberAxis, affine: Affine, tail: Sequence[str] = ()
    ) -> None:
        super().__init__(axis, affine, source, tail)
        for name in self.settings:
            setattr(self, name, getattr(source, name))


class SigmaLayerNorm(_Samplewise):
    """σNorm over LayerNorm with any ``normalized_shape``; x is ``(k·B, …, *normalized_shape)``."""

    channels_last = True
    settings = ("normalized_shape", "eps")
    normalized_shape: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its trailing dimensions, then scale and shift per member."""
        return self._normalise(
            x, lambda rows, w, b: F.layer_norm(rows, self.normalized_shape, w, b, self.eps)
        )


class SigmaRMSNorm(_Samplewise):
    """σNorm over RMSNorm; x is ``(k·B, …, *normalized_shape)``."""

    channels_last = True
    settings = ("normalized_shape", "eps")
    normalized_shape: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Divide x by the root mean square over its trailing dimensions, then scale per member."""
        y = F.rms_norm(x, self.normalized_shape, None, self.eps)
        return self.finish(self._scale_shift(y, *self.scale_and_shift()))


class SigmaGroupNorm(_Samplewise):
    """σNorm over GroupNorm; x is (k·B, C, …)."""

    settings = ("num_groups", "eps")
    num_groups: int

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over groups of channels, then scale and shift per member."""
        return self._normalise(
            x, lambda rows, w, b: F.group_norm(rows, self.num_groups, w, b, self.eps)
        )


class SigmaChannelsFirstLayerNorm(_Samplewise):
    """σNorm over a LayerNorm across dimension 1 of x (k·B, C, …), as in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its channels at each position, then scale and shift per member."""
        channels = self.logit.shape[1]
        if x.dim() < 2 or x.shape[1] != channels:
            raise InputError(
                f"σNorm layer '{self.where}' got shape {tuple(x.shape)}; expected {channels} "
                "channels in dimension 1"
            )

        def norm(rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            y = F.layer_norm(rows.movedim(1, -1), (channels,), weight, bias, self.eps)
            return y.movedim(-1, 1)

        return self._normalise(x, norm)

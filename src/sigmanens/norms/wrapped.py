"""σNorm over a norm of any class: normalise by a copy of the source, then scale per member."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sigmanens.errors import ConversionError
from sigmanens.norms.member import without_hooks
from sigmanens.norms.scales import Affine, SigmaNorm
from sigmanens.passes.context import MemberAxis


class SigmaWrappedNorm(SigmaNorm):
    r"""σNorm over a norm of any class that computes ``weight ⊙ norm(x) + bias`` sample by sample.

    .. math:: y_m = \mathrm{tail}(s_m \odot \mathrm{norm}(x) + b_m)

    Holds a copy of the source whose weight is neutral and whose bias is 0. What the source has
    besides (frozen statistics, shared parameters) stays in the copy, for all members.

    Args:
        source: the norm; x is (k·B, …).
        axis, affine: the member axis; scales ``(M, *S)`` and shifts.
        channels_last: whether S aligns with the trailing dimensions of x, or with dimension 1.
        neutral: the weight under which the source normalises only: 1, or 0 where it computes
            ``(1 + weight) ⊙ norm(x)``.
        tail: names of submodules that the source applies last (dropout, activation).

    Raises:
        ConversionError: if the source keeps statistics of the batch.
    """

    def __init__(
        self,
        source: nn.Module,
        axis: MemberAxis,
        affine: Affine,
        channels_last: bool = True,
        neutral: float = 1.0,
        tail: Sequence[str] = (),
    ) -> None:
        super().__init__(axis, affine, source, tail)
        if isinstance(source, _NormBase):
            raise ConversionError(
                f"a wrapped {type(source).__name__} would take its batch statistics over all "
                "members together: give register_norm a builder for it"
            )
        self.channels_last = channels_last
        self.neutral = neutral
        self.inner = without_hooks(source)
        for name, value in (("weight", neutral), ("bias", 0.0)):
            old = getattr(self.inner, name, None)
            if isinstance(old, Tensor):
                delattr(self.inner, name)
                self.inner.register_buffer(name, torch.full_like(old, value), persistent=False)
        for name in tail:
            setattr(self.inner, name, nn.Identity())

    def _blank(self) -> nn.Module:
        # Parameters that are no scale or shift are shared and may have been trained.
        norm = super()._blank()
        norm.load_state_dict(self.inner.state_dict(), strict=False)
        return norm

    def _plain_affine(self, members: slice) -> dict[str, Tensor]:
        values = super()._plain_affine(members)
        if self.neutral != 1.0:
            values["weight"] = values["weight"] - (1.0 - self.neutral)
        return values

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x by the wrapped norm, then scale and shift per member."""
        return self.finish(self._scale_shift(self.inner(x), *self.scale_and_shift()))

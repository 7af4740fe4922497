r"""Initial scales of a σNorm layer: from scratch, or carrying the scales of a pretrained norm.

========== =========================================================== =========================
init       scale of member m                                           members differ at step 0
========== =========================================================== =========================
normal     :math:`\sigma(\gamma_m),\ \gamma_m \sim N(0, 1)`            in function
preserve   :math:`c_m\sigma(\gamma_m) = w`, the base's scale           in γ, not in function
paper      :math:`k\,\sigma(\gamma) = w,\ k = \max_c|w_c| / 0.95`      no: fresh heads part them
========== =========================================================== =========================

"preserve" freezes the carrier :math:`c_m = w / \sigma(\gamma_m)`. A channel with :math:`w = 0` gets
a carrier of the layer's usual size and the offset :math:`o_m = -c_m\sigma(\gamma_m)`: it is exact
and still trains. "paper" (arXiv 2607.23860) needs positive scales. Under ``scale="linear"`` the
factor is drawn as in FiLM-Ensemble (arXiv 2206.00050): uniform with Xavier bound
:math:`a = \sqrt{6/(M + C)}` around 0 from scratch, around 1 under "preserve".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sigmanens.errors import ConversionError
from sigmanens.norms.scales import Affine

INITS = ("normal", "preserve", "paper")
_PAPER_MAXIMUM = 0.95


def initial_affine(
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    members: int,
    *,
    init: str,
    scale: str = "sigmoid",
    shift: bool | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    where: str = "norm",
) -> Affine:
    """Draw the scales and shifts of M members.

    Args:
        weight, bias: the base's scale w and shift (*S); None for an affine-free norm (w = 1).
        shape: parameter shape S.
        shift: one trained shift per member (True), none (False), or the default for this init
            (None): none from scratch, the base's shared and frozen when pretrained, one per
            member under "linear" from scratch.
        generator: source of γ; the default generator of the CPU otherwise.
        dtype: of the network, for norms without a weight; float32 at least.
        where: the layer's name, for errors.

    Raises:
        ConversionError: if the base's scales cannot be carried by this init, or its shift would be
            dropped by ``shift=False``.
    """
    if weight is not None and weight.is_meta:
        raise ConversionError(
            f"norm '{where}' lies on the meta device and has no values yet: load the weights first"
        )
    full = (members, *shape)
    dtype = dtype or torch.float32 if weight is None else weight.dtype
    dtype = torch.promote_types(torch.float32, dtype)
    w = None if weight is None else weight.detach().to("cpu", dtype)
    b = None if bias is None else bias.detach().to("cpu", dtype)

    def to(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(device)

    if init == "normal":
        logit = _draw(full, scale, 0.0, generator, dtype)
        linear = scale == "linear"
        start = _draw(full, scale, 0.0, generator, dtype) if linear else torch.zeros_like(logit)
        own = start if (linear if shift is None else shift) else None
        return Affine(logit.to(device), shift=to(own), kind=scale)

    w = torch.ones(shape, dtype=dtype) if w is None else w
    if not torch.isfinite(w).all():
        raise ConversionError(
            f"norm '{where}' has scales that are not finite: the base's weights are damaged"
        )
    if shift is False and b is not None and bool((b != 0).any()):
        raise ConversionError(
            f"norm '{where}' has a trained shift, which shift=False would drop, so that "
            f"init={init!r} could not keep the base's function. Use shift=None (the base's shift, "
            "shared) or shift=True (one per member, starting there)"
        )
    carried = None if b is None or shift is False else b.clone()
    if shift:
        carried = (torch.zeros(shape, dtype=dtype) if b is None else b).expand(full).clone()

    offset: Tensor | None = None
    if init == "preserve":
        logit = _draw(full, scale, 1.0, generator, dtype)
        factor = torch.sigmoid(logit) if scale == "sigmoid" else logit
        dead = w.abs() < torch.finfo(dtype).tiny
        usual = torch.ones((), dtype=dtype) if dead.all() else w.abs()[~dead].mean()
        carrier = torch.where(dead, usual, w / factor)
        if dead.any():
            offset = torch.where(dead, -(carrier * factor), 0.0)
    else:
        if scale != "sigmoid":
            raise ConversionError("init='paper' is defined for scale='sigmoid' only")
        if bad := int((w <= 0).sum()):
            raise ConversionError(
                f"init='paper' needs positive scales; {bad} of {w.numel()} in norm '{where}' are "
                "zero or negative. Use init='preserve', which carries any scale exactly"
            )
        k = w.max() / _PAPER_MAXIMUM
        logit = torch.logit(w / k).expand(full).clone()
        carrier = k.expand((1,) * len(full)).clone()
    return Affine(logit.to(device), to(carrier), to(offset), to(carried), scale)


def _draw(
    shape: tuple[int, ...],
    scale: str,
    centre: float,
    generator: torch.Generator | None,
    dtype: torch.dtype,
) -> Tensor:
    """γ ~ N(0, 1), or the linear factor uniform within the Xavier bound around ``centre``."""
    source = "cpu" if generator is None else generator.device
    if scale == "sigmoid":
        return torch.randn(shape, generator=generator, device=source).to("cpu", dtype)
    bound = math.sqrt(6.0 / (shape[0] + math.prod(shape[1:])))
    if centre:
        bound = min(bound, 0.5)
    uniform = torch.rand(shape, generator=generator, device=source).to("cpu", dtype)
    return centre + bound * (2 * uniform - 1)

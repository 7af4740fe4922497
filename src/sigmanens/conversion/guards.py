"""Networks that fold norms into shared weights (re-parameterise) must not while members differ."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from torch import nn

from sigmanens.errors import ConversionError
from sigmanens.norms import MemberNorm

# What timm (levit, repvit, mobileone, fastvit, ghostnet, …) and torchvision's quantisable networks
# call it. Anything else that computes with a norm's weight meets the shape (M, C).
_METHODS = (
    "fuse", "reparameterize", "switch_to_deploy", "convert_to_deploy", "fuse_model",
    "_fuse_bn_tensor", "_fuse_bn",
)  # fmt: skip


def forbid_fusing(network: nn.Module) -> None:
    """Make the fusing methods of every module that holds members' norms raise ConversionError."""
    for name, module in network.named_modules(remove_duplicate=False):
        if any(isinstance(m, MemberNorm) for m in module.modules()):
            for method in _METHODS:
                if callable(getattr(type(module), method, None)):
                    vars(module)[method] = partial(_refuse, type(module).__name__, method, name)


def allow_fusing(network: nn.Module) -> None:
    """Undo :func:`forbid_fusing`, in a plain network made from a converted one."""
    for module in network.modules():
        for method in _METHODS:
            found = vars(module).get(method)
            if isinstance(found, partial) and found.func is _refuse:
                del vars(module)[method]


def _refuse(cls: str, method: str, name: str, *args: object, **kwargs: object) -> NoReturn:
    where = f"'{name}' ({cls})" if name else f"this {cls}"
    raise ConversionError(
        f"{method}() of {where} would fold norms into shared weights, but each member has scales "
        f"of its own. Take one member out first: ens.member(0).{method}()"
    )

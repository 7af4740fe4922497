"""What reads the weights of norms from outside is switched off while members differ.

Networks that fold norms into shared weights (re-parameterise) refuse, and nn.TransformerEncoder and
its layers leave the fused path that they take in evaluation.
"""

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
_FUSED = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
_FORMER = "_sigmanens_former"  # what the attributes above were, in the module itself


def switch_off(network: nn.Module) -> None:
    """Make the fusing methods of modules with members' norms raise, and leave the fused paths."""
    for name, module in network.named_modules():
        if not any(isinstance(m, MemberNorm) for m in module.modules()):
            continue
        for method in _METHODS:
            if callable(getattr(type(module), method, None)):
                vars(module)[method] = partial(_refuse, type(module).__name__, method, name)
        for kind, attribute, off in _FUSED:
            if isinstance(module, kind):
                vars(module)[_FORMER] = {attribute: getattr(module, attribute)}
                setattr(module, attribute, off)


def switch_on(network: nn.Module) -> None:
    """Undo :func:`switch_off`, in a plain network made from a converted one."""
    for module in network.modules():
        for method in _METHODS:
            found = vars(module).get(method)
            if isinstance(found, partial) and found.func is _refuse:
                del vars(module)[method]
        for attribute, value in vars(module).pop(_FORMER, {}).items():
            setattr(module, attribute, value)


def _refuse(cls: str, method: str, name: str, *args: object, **kwargs: object) -> NoReturn:
    where = f"'{name}' ({cls})" if name else f"this {cls}"
    raise ConversionError(
        f"{method}() of {where} would fold norms into shared weights, but each member has scales "
        f"of its own. Take one member out first: ens.member(0).{method}()"
    )

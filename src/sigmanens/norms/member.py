"""A normalisation layer of M members: what σNorms and kept batch norms have in common.

Every layer takes the members of the pass folded into dimension 0, member-major. Scales, shifts and
statistics stay in float32 under autocast, ``.half()`` and ``.bfloat16()``; the result has the dtype
of the normalised input.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from sigmanens.errors import ExportError, InputError
from sigmanens.norms.kernels import each, scales_in_kernel
from sigmanens.norms.kinds import stand_for
from sigmanens.passes.context import MemberAxis, MemberLayer

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_SETTINGS = ("eps", "momentum", "track_running_stats")  # which other code changes on a norm


def adopt_hooks(new: nn.Module, source: nn.Module) -> None:
    """Let ``new`` call the hooks that were registered on ``source``; their handles keep working."""
    for key in HOOKS:
        setattr(new, key, getattr(source, key))
    new._is_full_backward_hook = source._is_full_backward_hook


def without_hooks(module: nn.Module) -> nn.Module:
    """A deep copy of a norm that calls none of its hooks."""
    bare = copy.copy(module)
    for key in HOOKS:
        setattr(bare, key, OrderedDict())
    return copy.deepcopy(bare)


class MemberNorm(MemberLayer):
    """A normalisation layer that knows the member axis. Base of σNorms and of kept batch norms.

    ``tail`` names the submodules (dropout, activation) that ``source`` applies last, in this order.
    They keep their names. Absent ones are passed over.
    """

    prefix = "Member"  # of the name of a class made for a source's class

    where: str
    channels_last: bool = False  # parameters align with the trailing dimensions, not dimension 1
    always_evaluates: bool = False  # .train() leaves the layer itself in evaluation mode

    def __init__(
        self, axis: MemberAxis, source: nn.Module | None = None, tail: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.axis = axis
        self.where = type(self).__name__
        self._template: list[nn.Module] = []  # in a list, so that it is no submodule
        self.tail = tuple(n for n in tail if isinstance(getattr(source, n, None), nn.Module))
        for name in self.tail:
            self.add_module(name, getattr(source, name))

    def take_place_of(self, source: nn.Module, like: Tensor | None = None) -> None:
        """Be a norm of the source's class to other code, and keep a copy as template of plain ones.

        The attributes of the source that this layer lacks (``affine``, ``momentum``, …) become its
        own. ``like`` has the dtype and device of the network, for norms without tensors.
        """
        self._template = [without_hooks(source)]
        for key, value in vars(source).items():
            if not hasattr(self, key) and getattr(value, "__self__", None) is not source:
                setattr(self, key, value)
        stand_for(self, type(source))

    @property
    def template(self) -> nn.Module:
        """A plain norm of the source's class.

        Raises:
            InputError: if this layer has taken no norm's place.
        """
        if not self._template:
            raise InputError(
                f"layer '{self.where}' was not made by conversion: it has no plain form"
            )
        return self._template[0]

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the layer and its submodules, as the replaced norm would."""
        super().train(mode)
        if self.always_evaluates:
            self.training = False
        return self

    def finish(self, y: Tensor) -> Tensor:
        """Apply the source's dropout and activation to the scaled y."""
        for name in self.tail:
            y = getattr(self, name)(y)
        return y

    @torch.no_grad()
    def plain(self, members: slice) -> nn.Module:
        """A norm of the source's own class with the affine and statistics of the given members.

        One member's are taken over exactly; those of several are averaged.

        Raises:
            InputError: if the source's class has no ``weight`` or ``bias`` to take them over.
        """
        norm = self._blank()
        values = self._plain_affine(members)
        for key, value in values.items():
            neutral, what = (1.0, "scale") if key == "weight" else (0.0, "shift")
            old = getattr(norm, key, None)
            if isinstance(old, Tensor):
                old.copy_(value)
            elif hasattr(norm, key):
                like = getattr(norm, "weight", None)
                dtype = like.dtype if isinstance(like, Tensor) else value.dtype
                setattr(norm, key, nn.Parameter(value.to(dtype).clone()))
            elif bool((value != neutral).any()):
                raise InputError(
                    f"layer '{self.where}' has a {what} per member, which a plain "
                    f"{type(norm).__name__} cannot carry: it has no '{key}'"
                )
        if values:
            for flag in ("affine", "elementwise_affine"):
                if hasattr(norm, flag):
                    setattr(norm, flag, True)
        self._plain_statistics(norm, members)
        norm.training = self.training
        return norm

    @torch.no_grad()
    def become_plain(self) -> None:
        """Be a norm of the source's own class from now on, with the first member's statistics.

        It stays the object that it is, and so do its parameters, hooks, dropout and activation.
        """
        plain, own = self.plain(slice(0, 1)), dict(vars(self))
        own_parameters = {k: p for k, p in self._parameters.items() if k in plain._parameters}
        dtype = next((p.dtype for p in own_parameters.values() if p is not None), None)
        for key, value in self._buffers.items():
            if value is not None and plain._buffers.get(key) is not None:
                plain._buffers[key] = value[0].to(dtype if value.dim() > 1 else None, copy=True)
        plain.training &= not getattr(self, "frozen_statistics", False)
        plain._parameters.update(own_parameters)
        vars(self).clear()
        vars(self).update(
            vars(plain) | {key: own[key] for key in (*HOOKS, "_is_full_backward_hook", "_modules")}
        )
        self.__class__ = type(plain)  # type: ignore[assignment]

    def _blank(self) -> nn.Module:
        """A fresh copy of the template, its dropout and activation as they are now."""
        norm = copy.deepcopy(self.template)
        for key in _SETTINGS:
            if hasattr(norm, key) and hasattr(self, key):
                setattr(norm, key, getattr(self, key))
        for name in self.tail:
            setattr(norm, name, copy.deepcopy(getattr(self, name)))
        return norm

    def _plain_affine(self, members: slice) -> dict[str, Tensor]:
        """Weight and bias of the plain norm: means over the members."""
        scale, shift = self.scales(), self.shifts()
        values = {"weight": scale[members].mean(0)}
        if shift is not None:
            values["bias"] = (shift[members] if shift.shape[0] > 1 else shift).mean(0)
        elif getattr(self.template, "bias", None) is not None:
            values["bias"] = torch.zeros_like(values["weight"])
        return values

    def _plain_statistics(self, norm: nn.Module, members: slice) -> None:
        """Put running statistics into the plain norm, where this layer has any."""

    def scales(self) -> Tensor:
        """Effective scales of all members, ``(M, *S)``, at least float32."""
        raise NotImplementedError

    def shifts(self) -> Tensor | None:
        """Shifts ``(M, *S)`` or shared ``(1, *S)``, at least float32, or None."""
        raise NotImplementedError

    def scale_and_shift(self) -> tuple[Tensor, Tensor | None]:
        """Scales ``(k, *S)`` and shifts ``(k or 1, *S)`` of the k members in this pass."""
        made = self.axis.current
        scale, shift = self.scales(), self.shifts()
        if made.perturbed:
            scale = self._apart(scale)
        if made.count != made.held:
            scale = scale[made.members]
            if shift is not None and shift.shape[0] != 1:
                shift = shift[made.members]
        return scale, shift

    def _apart(self, scale: Tensor) -> Tensor:
        """Scales ``(M, *S)`` that differ visibly between members, for a check; shared ones stay."""
        return scale

    def _normalise(
        self, x: Tensor, norm: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    ) -> Tensor:
        """``norm(rows, scale, shift)`` of each member's rows of x (k·B, …), and then the tail."""
        scale, shift = self.axis.recall(self, self.scale_and_shift)
        if scales_in_kernel(x, scale):
            self._check_rows(x)
            y = each(lambda _, rows, weight, bias: norm(rows, weight, bias), x, scale, shift)
        else:
            y = self._scale_shift(norm(x, None, None), scale, shift)
        return self.finish(y)

    def _scale_shift(self, y: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        """``scale ⊙ y + shift`` with the members' rows of y (k·B, …) matched to ``(k, *S)``."""
        self._check_rows(y)
        k = self.axis.current.count
        rows = y.unflatten(0, (k, y.shape[0] // k))
        if shift is None:
            out = rows * self._placed(scale, rows)
        else:
            out = torch.addcmul(self._placed(shift, rows), rows, self._placed(scale, rows))
        return out.to(y.dtype).flatten(0, 1)

    def _placed(self, t: Tensor, rows: Tensor) -> Tensor:
        """View t ``(k, *S)`` so that it broadcasts over rows (k, B, …)."""
        if self.channels_last:
            return t.view(t.shape[0], *(1,) * (rows.dim() - t.dim()), *t.shape[1:])
        return t.view(t.shape[0], 1, t.shape[1], *(1,) * (rows.dim() - 3))

    def _check_rows(self, x: Tensor) -> None:
        """Raise an error that names the layer if the k members do not divide the rows of x."""
        k = self.axis.current.count
        if x.shape[0] % k:
            raise InputError(
                f"σNorm layer '{self.where}' got {x.shape[0]} rows in dimension 0, which {k} "
                "folded members do not divide: the network moves its batch dimension. "
                "Use schedule='sequential'"
            )

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # the replaced class may print its own tensors

    def _load_from_state_dict(self, *args: Any) -> None:
        # Not by what the replaced class does with states of its own older versions.
        nn.Module._load_from_state_dict(self, *args)

    def __prepare_scriptable__(self) -> NoReturn:
        """What ``torch.jit.script`` calls first."""
        raise ExportError(
            f"torch.jit.script does not compile layer '{self.where}', whose members are chosen "
            "call by call. Use sigmanens.export_program(ens, example), torch.jit.trace(ens, "
            "example), or script a plain network: ens.member(i)"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow device moves and casts to float64, but never drop below float32."""

        def keep(t: Tensor) -> Tensor:
            out = fn(t)
            narrow = t.is_floating_point() and out.is_floating_point() and out.element_size() < 4
            return t.to(out.device) if narrow else out

        # Plain norms, activations and wrapped norms have the dtype they would have in the base.
        for module in (*self._template, *(self.children() if recurse else ())):
            module._apply(fn)
        return super()._apply(keep, recurse=False)

"""How a base network is made anew, for checkpoints that hold all its tensors.

A checkpoint names a model of timm, transformers or torchvision, or a function of the user's. The
network is made with random weights; nothing is downloaded or unpickled.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from sigmanens.conversion.config import ConversionConfig
from sigmanens.conversion.heads import last_linear
from sigmanens.errors import CheckpointError, InputError, MissingPackageError
from sigmanens.seeding import own_random_state

_SIMPLE = (bool, int, float, str, tuple, type(None))
_PASSING = ("training", "name_or_path", "gradient_checkpointing", "grad_checkpointing")


@dataclass(frozen=True)
class Source:
    """What makes a network of one architecture.

    Attributes:
        name: ``"package.module:function"`` of a subclass of ``nn.Module``, or of a function that is
            annotated to return one; or a name that the library in ``kind`` knows.
        options: keyword arguments, as JSON has them.
        kind: "factory", or "timm", "transformers" (``name`` is a class, ``options`` its config) or
            "torchvision".
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "factory"

    def make(self, dtype: str, device: str = "cpu") -> nn.Module:
        """The network in a dtype such as "float32", its weights random; on "meta" without values.

        Torch's random state is left as it was.

        Raises:
            MissingPackageError: without the library. CheckpointError: if the name is not one that
                may be called, or the call fails.
        """
        make = _MAKERS.get(self.kind)
        if make is None or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise CheckpointError(f"the network was made by {self}, which is unknown. Give base=…")
        library = self.name.partition(".")[0].partition(":")[0]
        library = library if self.kind == "factory" else self.kind
        if find_spec(library) is None:
            raise MissingPackageError(f"making the network of {self} needs {library}")
        try:
            with own_random_state(), torch.device(device):
                made = make(self.name, **self.options)
                assert isinstance(made, nn.Module), f"it made a {type(made).__name__}"
                return made.to(getattr(torch, dtype))
        except CheckpointError:
            raise
        except Exception as e:
            raise CheckpointError(f"making the network of {self} failed: {e}. Give base=…") from e

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


# Other keyword arguments of these libraries read files or download weights.


def _timm(name: str, /, num_classes: int, in_chans: Any = None, img_size: Any = None) -> Any:
    timm = import_module("timm")
    if not timm.is_model(name):  # others are names on a hub
        raise CheckpointError(f"timm has no model {name!r}")
    return timm.create_model(
        name, pretrained=False, num_classes=num_classes, in_chans=in_chans, img_size=img_size
    )


def _transformers(name: str, /, config: dict[str, Any], attention: str | None) -> Any:
    library = import_module("transformers")
    cls: Any = getattr(library, name, None)
    if library.PreTrainedModel not in getattr(cls, "__mro__", ()):
        raise CheckpointError(f"transformers has no model class {name!r}")
    made = cls.config_class.from_dict(config)
    if attention is not None and not re.fullmatch("[a-z0-9_]+", attention):  # one on a hub
        raise CheckpointError(f"attention {attention!r} is not one of transformers' own")
    made._attn_implementation = attention
    if getattr(made, "use_pretrained_backbone", False):
        made.use_pretrained_backbone = False  # its weights are in the checkpoint
    return cls(made)


def _torchvision(name: str, /, num_classes: int) -> Any:
    models = import_module("torchvision.models")
    if name not in models.list_models(module=models):  # others load weights of a backbone
        raise CheckpointError(f"torchvision has no classifier {name!r}")
    return models.get_model(name, weights=None, num_classes=num_classes)


def _factory(name: str, /, **options: Any) -> Any:
    module, _, function = name.partition(":")
    make: Any = getattr(import_module(module), function, None)
    promised = get_type_hints(make).get("return") if inspect.isfunction(make) else make
    if not isinstance(promised, type) or not issubclass(promised, nn.Module):
        raise CheckpointError(
            f"factory {name!r} is not called: expected 'package.module:function' of a subclass of "
            "nn.Module, or of a function with the annotation '-> nn.Module'"
        )
    return make(**options)


_MAKERS: dict[str, Callable[..., Any]] = {
    "timm": _timm, "transformers": _transformers, "torchvision": _torchvision, "factory": _factory,
}  # fmt: skip


def find_source(
    plain: nn.Module, plan: ConversionConfig, factory: str | Source | None
) -> dict[str, Any] | None:
    """What a checkpoint says of how to make its base anew: the source and the dtype.

    ``plain`` is one member as a plain network. Where the user names no ``factory``, timm,
    transformers and torchvision are asked; None if they make no such network.

    Raises:
        CheckpointError: if the factory makes another network. InputError: if it cannot be found
            again from another program.
    """
    tensors = [t for t in plain.state_dict().values() if isinstance(t, Tensor)]
    dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    if factory is not None:
        source = Source(factory) if isinstance(factory, str) else factory
        if not re.fullmatch(r"[\w.]+:\w+", source.name) or source.name.startswith("__main__"):
            raise InputError(
                f"factory is {source.name!r}; expected 'package.module:function', which another "
                "program can import"
            )
        odd = _odd(plain, source.make(dtype), plan)
        if odd is not None:
            raise CheckpointError(f"the factory {source.name!r} makes another network: {odd}")
        return asdict(source) | {"dtype": dtype}
    for source in _candidates(plain):
        for device in ("meta", "cpu"):  # some models read numbers while they are made
            try:
                made = source.make(dtype, device)
            except CheckpointError:
                continue
            if _odd(plain, made, plan) is None:
                return asdict(source) | {"dtype": dtype}
            break
    return None


def _candidates(plain: nn.Module) -> list[Source]:
    """Sources that may make such a network."""
    cls = type(plain)
    library = cls.__module__.partition(".")[0]
    if library == "transformers":
        config: Any = plain.config
        attention = getattr(config, "_attn_implementation", None)
        made = {"config": json.loads(config.to_json_string(use_diff=False)), "attention": attention}
        return [Source(cls.__name__, made, library)]
    if library not in ("timm", "torchvision"):
        return []
    last = last_linear(plain)
    classes = getattr(plain, "num_classes", 0 if last is None else last.out_features)
    options: dict[str, Any] = {"num_classes": int(classes or 0)}
    if library == "torchvision":
        models = import_module("torchvision.models")
        return [
            Source(name, options, library)
            for name in models.list_models(module=models)
            if inspect.signature(models.get_model_builder(name)).return_annotation is cls
        ]
    described: Any = getattr(plain, "pretrained_cfg", None)
    name = described.get("architecture") if isinstance(described, Mapping) else None
    first = next((m for m in plain.modules() if isinstance(m, nn.Conv2d)), None)
    if first is not None and first.in_channels != 3:
        options["in_chans"] = first.in_channels
    sized = getattr(getattr(plain, "patch_embed", None), "img_size", None)
    sizes = [{}] if sized is None else [{}, {"img_size": list(sized)}]
    return [Source(str(name), options | size, library) for size in sizes]


def _odd(plain: nn.Module, made: nn.Module, plan: ConversionConfig) -> str | None:
    """What differs between a member and a new network: layers, settings or tensors."""
    ours, theirs = (_described(network, plan) for network in (plain, made))
    key = next((k for k in (*ours, *theirs) if ours.get(k) != theirs.get(k)), None)
    return None if key is None else f"{key} is {theirs.get(key)} instead of {ours.get(key)}"


def _described(network: nn.Module, plan: ConversionConfig) -> dict[str, Any]:
    """Classes and settings of all modules, shapes and dtypes of all tensors, by name.

    Of converted norms the class, of fresh heads the sizes.
    """
    fresh = plan.heads if plan.head == "fresh" else ()
    heads = tuple(f"{name}." for name in fresh)
    changed = (*heads, *(f"{name}." for name in plan.norms))
    found: dict[str, Any] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        if name in fresh:
            linear = last_linear(module)
            found[f"head '{name}'"] = linear and (linear.in_features, linear.out_features)
        elif not name.startswith(heads):
            found[f"layer '{name}'"] = type(module)
            if name not in plan.norms:
                simple = {k: v for k, v in vars(module).items() if isinstance(v, _SIMPLE)}
                public = {k: v for k, v in simple.items() if k not in _PASSING and k[:1] != "_"}
                found[f"settings of '{name}'"] = (public, module.extra_repr())
    for key, tensor in network.state_dict().items():
        if isinstance(tensor, Tensor) and not key.startswith(changed):
            found[f"tensor '{key}'"] = (tuple(tensor.shape), tensor.dtype)
    return found

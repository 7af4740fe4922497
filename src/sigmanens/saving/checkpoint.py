"""Save what the members add to a base network, and put it back on a fresh one.

A checkpoint is a folder with ``sigmanens.json`` (version, plan, settings, fingerprints of the base,
digests) and one safetensors file of the members' scales, shifts, statistics and heads. The JSON
names that file and is replaced last: a save that dies half-way leaves the former checkpoint whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from sigmanens.conversion.build import Converted, build, share
from sigmanens.conversion.config import ConversionConfig
from sigmanens.conversion.fingerprint import fingerprint, own_keys, shared_fingerprints, structure
from sigmanens.conversion.plain import member
from sigmanens.conversion.rules import qualified_name
from sigmanens.errors import CheckpointError, ConversionError, InputError
from sigmanens.norms import SigmaNorm
from sigmanens.norms.scales import is_sharded
from sigmanens.saving.source import Source, find_source

_VERSION = 4
_JSON = "sigmanens.json"
_MAYBE = ("task", "prefix")  # of a plan, None until they are known


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says besides the tensors.

    Attributes:
        plan: how the ensemble was built.
        base_fingerprint: of the shared tensors at conversion, by state-dict key.
        temperature: T of the averaged distribution.
        frozen_statistics: whether batch statistics stay as they are in training.
    """

    plan: ConversionConfig
    base_fingerprint: Mapping[str, int]
    temperature: float
    frozen_statistics: bool


def save(
    network: nn.Module,
    saved: Saved,
    directory: str | Path,
    shared: str,
    *,
    made: Mapping[str, str],
    factory: str | Source | None,
) -> Path:
    """Save a converted network, ``made`` being its structure at conversion.

    Arguments and errors are those of :meth:`sigmanens.SigmaEnsemble.save_pretrained`. After an
    error an older checkpoint is whole.
    """
    if factory is not None and shared != "always":
        raise InputError(
            f"factory makes the base for a file that holds all its tensors: shared is {shared!r}; "
            "expected 'always'"
        )
    if shared not in ("auto", "never", "always"):
        raise InputError(f"shared is {shared!r}; expected 'auto', 'never' or 'always'")
    if is_sharded(network):
        raise CheckpointError(
            "parameters are divided over ranks (FSDP): gather them by get_model_state_dict(ens, "
            "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint and "
            "load them into an ensemble of one process, which can be saved (docs/scale.md)"
        )
    check_structure(network, made)
    now, base = shared_fingerprints(network), saved.base_fingerprint
    changed = sorted(k for k in now if now[k] != base.get(k))
    if changed and shared == "never":
        raise CheckpointError(
            f"{len(changed)} shared tensors have changed since conversion (first: '{changed[0]}'), "
            "without which the base would not give these outputs. Use shared='auto', or train with "
            "convert(train='members')"
        )
    extra = set(now) if shared == "always" else set(changed)
    source = None
    if extra == set(now):
        try:
            plain = member(network, 0, saved.plan.members)
            source = find_source(plain, saved.plan, factory)
        except (InputError, ConversionError):  # a norm that has no plain form
            if factory is not None:
                raise
    state = network.state_dict().items()
    kept = {k: v for k, v in state if k in own_keys(network) | extra and isinstance(v, Tensor)}
    payload = save_tensors({k: v.detach().cpu().contiguous().clone() for k, v in kept.items()})
    digest = hashlib.sha256(payload).hexdigest()
    weights = f"sigmanens-{digest[:16]}.safetensors"
    meta = {
        "format": "sigmanens",
        "version": _VERSION,
        "plan": saved.plan.to_dict(),
        "temperature": saved.temperature,
        "frozen_statistics": saved.frozen_statistics,
        "frozen_scales": _frozen_scales(network),
        "base_class": qualified_name(type(network)),
        "base": {k: f"{v:016x}" for k, v in sorted(base.items())},
        "shared": sorted(extra),
        "source": source,
        "weights": weights,
        "sha256": digest,
    }
    meta["checksum"] = _checksum(meta)
    folder = Path(directory)
    absent, new = not folder.exists(), not (folder / weights).exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / weights, payload)
        write_atomic(folder / _JSON, json.dumps(meta, indent=1).encode())
    except OSError as e:
        with contextlib.suppress(OSError):
            if new:
                (folder / weights).unlink(missing_ok=True)
            if absent:
                folder.rmdir()
        raise CheckpointError(
            f"could not save to {folder}: {e.strerror or e}. What was there before is unchanged"
        ) from e
    for old in {*folder.glob("sigmanens-*.safetensors")} - {folder / weights}:
        with contextlib.suppress(OSError):
            old.unlink()
    return folder / weights


def check_values(network: nn.Module) -> None:
    """Raise CheckpointError for a network with tensors on the meta device."""
    tensors = [*network.named_parameters(), *network.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{len(empty)} tensors lie on the meta device and have no values (first: "
            f"'{empty[0]}'). Load them before you save"
        )


def check_structure(network: nn.Module, made: Mapping[str, str]) -> None:
    """Raise CheckpointError if layers or tensors were changed since ``made``, the conversion.

    The error names the first that was added, removed, replaced, resized or parametrised.
    """
    now = structure(network)
    what = next((key for key in (*made, *now) if made.get(key) != now.get(key)), None)
    if what is None:
        return
    if what in made and what in now:
        change = f"{what} was {made[what]} and is {now[what]}"
    elif what in made:
        change = f"{what}, {made[what]}, was removed"
    else:
        change = f"{what}, {now[what]}, was added"
    raise CheckpointError(
        f"this {type(network).__name__} was changed after its conversion: {change}. A checkpoint "
        "is loaded by converting the base again, which would not have the change. Nothing was "
        "written. Undo it before you save (parametrisations: torch.nn.utils.parametrize."
        "remove_parametrizations; older ones: torch.nn.utils.remove_weight_norm, "
        "remove_spectral_norm, prune.remove; adapters: merge_and_unload), make it in the base and "
        "convert that, or keep the members as plain networks: ens.member(i)"
    )


def load(directory: str | Path, base: nn.Module | None = None) -> tuple[Converted, Saved]:
    """Build the saved network on a copy of its base, or on a new one: see :func:`sigmanens.load`.

    Scale logits that were frozen while the rest was trained are frozen again.
    """
    folder = Path(directory)
    meta, saved, tensors = _read(folder)
    anew = base is None
    base = _new_base(folder, meta) if base is None else base
    try:
        converted = build(base, saved.plan, generator=torch.Generator().manual_seed(0))
    except (ConversionError, InputError, KeyError) as e:
        raise CheckpointError(
            f"the checkpoint in {folder} does not fit this {type(base).__name__}: {e}"
        ) from e
    if anew:
        _like_the_saved(converted, tensors)
    ours = converted.base_fingerprint
    _fill(converted.network, set(meta["shared"]), saved, tensors, ours, ours)
    if anew:
        found = shared_fingerprints(converted.network)
        wrong = sorted(k for k in found if k not in tensors or fingerprint(tensors[k]) != found[k])
        if wrong:
            raise CheckpointError(
                f"the network that was made for the checkpoint in {folder} is another: its "
                f"'{wrong[0]}' does not take the saved values. Give base=…"
            )
    converted.base_fingerprint = dict(saved.base_fingerprint)
    for name in meta["frozen_scales"]:
        norm = converted.network.get_submodule(name)
        assert isinstance(norm, SigmaNorm)
        norm.logit.requires_grad_(False)
    return converted, saved


def _new_base(folder: Path, meta: Mapping[str, Any]) -> nn.Module:
    """The base with random weights, in evaluation mode."""
    source = meta["source"]
    if source is None:
        why = f"does not say how to make the {meta['base_class']} it was made on"
        lacking = set(meta["base"]) - set(meta["shared"])
        if lacking:
            why = f"does not hold {len(lacking)} of the base's tensors"
        raise CheckpointError(
            f"the checkpoint in {folder} {why}. Give base=…, or save by save_pretrained(…, "
            "shared='always', factory='package.module:function')"
        )
    made = Source(str(source["name"]), dict(source["options"]), str(source["kind"]))
    return made.make(source["dtype"]).eval()


def _like_the_saved(converted: Converted, saved: Mapping[str, Tensor]) -> None:
    """Give norms an offset where the saved ones have it: where the true base has scales of 0."""
    for name, module in converted.network.named_modules():
        wanted = (f"{name}." if name else "") + "offset" in saved
        if isinstance(module, SigmaNorm) and wanted != (module.offset is not None):
            module.offset = torch.zeros_like(module.logit) if wanted else None
    converted.structure = structure(converted.network)


def load_into(converted: Converted, directory: str | Path) -> Saved:
    """Put a saved state into a network, and return what the checkpoint says besides the tensors.

    See :meth:`sigmanens.SigmaEnsemble.load_checkpoint`. After an error the network is as it was.
    """
    folder = Path(directory)
    network, plan = converted.network, converted.report.plan
    meta, saved, tensors = _read(folder)
    for key in ("members", "layers", "head_name", "head", "init", "scale", "shift", *_MAYBE):
        mine, theirs = getattr(plan, key), getattr(saved.plan, key)
        if mine != theirs and not (key in _MAYBE and None in (mine, theirs)):
            raise CheckpointError(
                f"the checkpoint in {folder} is of another conversion: its {key} is {theirs!r}, "
                f"this ensemble's {mine!r}. Convert alike, or use sigmanens.load(…, base=…)"
            )
    if plan.prefix is None and saved.plan.prefix:
        share(converted, saved.plan.prefix)
    ours, base = shared_fingerprints(network), converted.base_fingerprint
    _fill(network, set(meta["shared"]), saved, tensors, ours, base)
    return saved


def is_checkpoint(directory: str | Path) -> bool:
    """Whether a folder holds what :func:`save` writes."""
    return (Path(directory) / _JSON).is_file()


def _fill(
    network: nn.Module,
    stored: set[str],
    saved: Saved,
    tensors: Mapping[str, Tensor],
    ours: Mapping[str, int],
    base: Mapping[str, int],
) -> None:
    """Check everything, then copy the saved tensors; ``stored`` are those of the base.

    ``ours``: fingerprints of the shared tensors as they are now; ``base``: at conversion.
    """
    kind = type(network).__name__
    expected = saved.base_fingerprint
    unsaved = (set(expected) | set(ours)) - stored
    wrong = sorted(k for k in unsaved if expected.get(k) != base.get(k))
    if wrong:
        raise CheckpointError(
            f"this {kind} is not the base the checkpoint was made on: {len(wrong)} of "
            f"{len(expected)} shared tensors differ (first: '{wrong[0]}'). Load the same "
            "pretrained weights first"
        )
    moved = sorted(k for k in unsaved if ours.get(k) != base.get(k))
    if moved:
        raise CheckpointError(
            f"{len(moved)} shared tensors of this {kind} have changed since conversion (first: "
            f"'{moved[0]}'), which the checkpoint does not hold, for they were the base's when it "
            "was made. Use sigmanens.load(…, base=…) on the untouched base, or save with "
            "shared='always'"
        )
    needed = own_keys(network) | stored
    if set(tensors) != needed:
        odd = sorted(set(tensors) ^ needed)
        raise CheckpointError(
            f"the saved weights do not fit this {kind}: {len(odd)} tensors are missing or "
            f"unexpected (first: '{odd[0]}')"
        )
    state = network.state_dict()
    for key, value in tensors.items():
        mine = tuple(state[key].shape) if key in state else "is absent"
        if mine != tuple(value.shape):
            raise CheckpointError(
                f"tensor '{key}' has shape {tuple(value.shape)} in the checkpoint and "
                f"{mine} in this {kind}"
            )
    with torch.no_grad():
        for key, value in tensors.items():
            state[key].copy_(value)


def _frozen_scales(network: nn.Module) -> list[str]:
    """Norms whose scale logits are not trained, in an ensemble of which something is."""
    if not any(p.requires_grad for p in network.parameters()):
        return []  # no choice of some, as after requires_grad_(False) for prediction
    norms = [(n, m) for n, m in network.named_modules() if isinstance(m, SigmaNorm)]
    return [n for n, m in norms if not m.logit.requires_grad]


def _read(folder: Path) -> tuple[dict[str, Any], Saved, dict[str, Tensor]]:
    """The JSON of a checkpoint, what it says, and the tensors."""
    meta = _read_meta(folder)
    try:
        saved = Saved(
            ConversionConfig.from_dict(meta["plan"]),
            {k: int(v, 16) for k, v in meta["base"].items()},
            float(meta["temperature"]),
            bool(meta["frozen_statistics"]),
        )
    except (InputError, KeyError) as e:
        raise CheckpointError(f"the checkpoint in {folder} cannot be read: {e}") from e
    path = folder / Path(str(meta["weights"])).name
    try:
        payload = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"the weights {path} cannot be read: {e.strerror or e}") from e
    if hashlib.sha256(payload).hexdigest() != meta["sha256"]:
        raise CheckpointError(
            f"{path} ({len(payload):,} bytes) does not have the digest its {_JSON} names: it was "
            "truncated or altered. Copy the folder again"
        )
    return meta, saved, load_tensors(payload)


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / _JSON
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError as e:
        raise CheckpointError(
            f"no {_JSON} in {folder}: expected a folder written by save_pretrained"
        ) from e
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from e
    if not isinstance(meta, Mapping) or meta.get("format") != "sigmanens":
        raise CheckpointError(f"{path} is not a sigmanens checkpoint")
    if meta.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} has format version {meta.get('version')!r}; expected {_VERSION}. Use the "
            "sigmanens that wrote it"
        )
    if meta.get("checksum") != _checksum(meta):
        raise CheckpointError(
            f"{path} was altered after save_pretrained wrote it. Copy the folder again; to change "
            "a setting, load the ensemble, change it there and save"
        )
    return dict(meta)


def _checksum(meta: Mapping[str, Any]) -> str:
    """SHA-256 of what a checkpoint's JSON says, in one canonical form."""
    content = {k: v for k, v in meta.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_atomic(path: Path, payload: bytes) -> None:
    """Write a file next to its place and rename it there: readers see the old or the new, whole.

    Raises:
        OSError: if the disk is full or not writable; the old file is untouched.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(payload)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise

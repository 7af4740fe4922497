"""Save what the members add to a base network, and put it back on a fresh one.

A checkpoint is a folder with ``sigmanens.json`` (format version, plan, temperature, fingerprint of
the base, digests) and one safetensors file of the members' scales, carriers, shifts, statistics and
heads, a few kilobytes for a small network. The JSON names the weights file and is replaced last, so
that a save that dies half-way leaves the former checkpoint whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from sigmanens.build import build
from sigmanens.ensemble import SigmaEnsemble
from sigmanens.errors import CheckpointError, ConversionError, InputError
from sigmanens.fingerprint import own_keys, shared_fingerprints
from sigmanens.plan import Plan
from sigmanens.rules import qualified_name

__all__ = ["FORMAT_VERSION", "load", "save_pretrained", "write_atomic"]

FORMAT_VERSION = 1
_JSON = "sigmanens.json"


def save_pretrained(ensemble: SigmaEnsemble, directory: str | Path, shared: str = "auto") -> Path:
    """Save an ensemble on top of its untouched base.

    Args:
        ensemble: what :func:`sigmanens.convert` made.
        directory: folder to write into; made if missing. An older checkpoint there is replaced.
        shared: "auto" also saves shared tensors that training has changed since conversion,
            "never" raises if there are any, "always" saves all.

    Returns:
        the path of the weights file; its size is what the members cost on disk.

    Raises:
        CheckpointError: if shared tensors changed under "never", or writing fails; then an older
            checkpoint stays whole.
        InputError: for an unknown ``shared``.
    """
    if shared not in ("auto", "never", "always"):
        raise InputError(f"shared is {shared!r}; expected 'auto', 'never' or 'always'")
    state = {k: v for k, v in ensemble.network.state_dict().items() if isinstance(v, Tensor)}
    own = own_keys(ensemble.network)
    now = shared_fingerprints(ensemble.network)
    base = ensemble.base_fingerprint
    changed = sorted(k for k in now if now[k] != base.get(k))
    if changed and shared == "never":
        raise CheckpointError(
            f"{len(changed)} shared tensors have changed since conversion (first: '{changed[0]}'), "
            "without which the base would not give these outputs. Use shared='auto', or train with "
            "convert(train='members')"
        )
    extra = set(now) if shared == "always" else set(changed)
    kept = {k: v.detach().cpu().contiguous().clone() for k, v in state.items() if k in own | extra}
    payload = save_tensors(kept)
    digest = hashlib.sha256(payload).hexdigest()
    weights = f"sigmanens-{digest[:16]}.safetensors"
    meta = {
        "format": "sigmanens",
        "version": FORMAT_VERSION,
        "plan": ensemble.plan.to_dict() | {"schedule": ensemble.schedule},
        "temperature": float(ensemble.temperature),
        "base_class": qualified_name(type(ensemble.network)),
        "base": {k: f"{v:016x}" for k, v in sorted(base.items())},
        "shared": sorted(extra),
        "weights": weights,
        "sha256": digest,
    }
    meta["checksum"] = _checksum(meta)
    folder = Path(directory)
    made, new = not folder.exists(), not (folder / weights).exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / weights, payload)
        write_atomic(folder / _JSON, json.dumps(meta, indent=1).encode())
    except OSError as e:
        with contextlib.suppress(OSError):
            if new:
                (folder / weights).unlink(missing_ok=True)
            if made:
                folder.rmdir()
        raise CheckpointError(
            f"could not save to {folder}: {e.strerror or e}. What was there before is unchanged"
        ) from e
    for old in folder.glob("sigmanens-*.safetensors"):
        if old.name != weights:
            with contextlib.suppress(OSError):
                old.unlink()
    return folder / weights


def load(directory: str | Path, base: nn.Module) -> SigmaEnsemble:
    """Build the saved ensemble on a copy of its base network.

    Args:
        directory: folder written by :func:`save_pretrained`, on any device.
        base: the unconverted network with the weights it had at conversion; the ensemble lands on
            its device and in its mode.

    Raises:
        CheckpointError: if files are missing, truncated or altered, the version is unknown, or the
            base is not the one the checkpoint was made on.
    """
    folder = Path(directory)
    meta = _read_meta(folder)
    try:
        plan = Plan.from_dict(meta["plan"])
        ensemble = build(base, plan, generator=torch.Generator().manual_seed(0))
    except (ConversionError, InputError, KeyError) as e:
        raise CheckpointError(
            f"the checkpoint in {folder} does not fit this {type(base).__name__}: {e}"
        ) from e
    saved = _read_weights(folder, meta)
    expected = {k: int(v, 16) for k, v in meta["base"].items()}
    stored = set(meta["shared"])
    ours = ensemble.base_fingerprint
    wrong = sorted(
        k for k in (set(expected) | set(ours)) - stored if expected.get(k) != ours.get(k)
    )
    if wrong:
        raise CheckpointError(
            f"this {type(base).__name__} is not the base the checkpoint was made on: "
            f"{len(wrong)} of {len(expected)} shared tensors differ (first: '{wrong[0]}'). Load "
            "the same pretrained weights first"
        )
    ensemble.base_fingerprint = expected
    needed = own_keys(ensemble.network) | stored
    if set(saved) != needed:
        odd = sorted(set(saved) ^ needed)
        raise CheckpointError(
            f"the weights in {folder} do not fit this {type(base).__name__}: "
            f"{len(odd)} tensors are missing or unexpected (first: '{odd[0]}')"
        )
    state = ensemble.network.state_dict()
    for key, value in saved.items():
        if state[key].shape != value.shape:
            raise CheckpointError(
                f"tensor '{key}' has shape {tuple(value.shape)} in the checkpoint and "
                f"{tuple(state[key].shape)} in this {type(base).__name__}"
            )
        with torch.no_grad():
            state[key].copy_(value)
    ensemble.temperature.fill_(float(meta["temperature"]))
    return ensemble


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
    if meta.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {meta.get('version')!r}; this sigmanens reads version "
            f"{FORMAT_VERSION}. Use the sigmanens that wrote it, or a newer one"
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


def _read_weights(folder: Path, meta: Mapping[str, Any]) -> dict[str, Tensor]:
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
    try:
        return load_tensors(payload)
    except SafetensorError as e:
        raise CheckpointError(f"{path} is no readable safetensors file: {e}") from e


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

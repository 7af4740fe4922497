"""A run is a folder with ``config.yaml``, ``metrics.json``, predictions, checkpoint and report.

Every file is written next to its place and renamed there. ``metrics.json`` comes last of the
results, so that a folder that has it is a finished run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save as save_tensors
from torch import Tensor

import sigmanens
from sigmanens.errors import ConfigError, RunError
from sigmanens.lab.plain import dump_json, to_json
from sigmanens.saving.checkpoint import write_atomic

RUN_FILES = (
    "config.yaml", "metrics.json", "inputs.json", "predictions.safetensors", "checkpoint",
    "report.html",
)  # fmt: skip


class Run:
    """A run folder being written.

    Args:
        folder: made if missing.
        config: what was asked, plain types; stored as ``config.yaml``.
        resume: continue an unfinished run of the same configuration.
        extendable: keys of the configuration that may differ under ``resume``; a run that has any
            may be continued after it was finished.
        complete: gives a stored configuration the keys that it lacks, because it was written by an
            older release.

    Raises:
        RunError: if the folder holds a run already, or, under ``resume``, a finished one or one of
            another configuration; or if it cannot be written to.
        ConfigError: if the configuration holds anything but plain types.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        resume: bool = False,
        extendable: Collection[str] = (),
        complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ) -> None:
        self.folder = Path(folder)
        try:
            text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError as e:
            raise ConfigError(
                f"the configuration cannot be stored as YAML: {e}. Use numbers, strings, lists and "
                "dicts only"
            ) from e
        if self.folder.exists() and not self.folder.is_dir():
            raise RunError(f"--out {self.folder} is a file; expected a folder, new or empty")
        present = [f for f in RUN_FILES if (self.folder / f).exists()]
        finished = "metrics.json" in present
        if resume and finished and not extendable:
            raise RunError(f"the run in {self.folder} is finished: there is nothing to resume")
        if present and not resume:
            raise RunError(
                f"{self.folder} holds {'a' if finished else 'an unfinished'} run already "
                f"({', '.join(present)}). Give another --out"
                + ("" if finished else ", continue a training with --resume, or remove the folder")
            )
        stored = self.folder / "config.yaml"
        given = yaml.safe_load(text)
        if stored.exists() and not _same(complete(read_config(self.folder)), given, extendable):
            raise RunError(
                f"the run in {self.folder} was started with another configuration; resume it "
                f"with --config {stored}"
            )
        self._new_folder = not self.folder.exists()
        self._new_config = not stored.exists()
        write_file(stored, text.encode())

    def discard(self) -> None:
        """Take back what the constructor wrote, where nothing came of the run."""
        if self._new_config:
            (self.folder / "config.yaml").unlink(missing_ok=True)
        if self._new_folder:
            with contextlib.suppress(OSError):  # it holds something by now
                self.folder.rmdir()

    def path(self, name: str) -> Path:
        """Path of a file or folder of the run."""
        return self.folder / name

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write ``metrics.json``; numbers that are not finite become null."""
        self.write_json("metrics.json", metrics)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file of the run; numbers that are not finite become null."""
        write_file(self.path(name), (dump_json(to_json(values)) + "\n").encode())


def write_file(path: Path, payload: bytes) -> None:
    """Write a file, whole or not at all, and its folder.

    Raises:
        RunError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, payload)
    except OSError as e:
        raise RunError(
            f"could not write {path}: {e.strerror or e}. Files that were there before are unchanged"
        ) from e


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], told: dict[str, str] | None = None
) -> None:
    """Write a file of tensors: on the CPU, in the usual memory format, none shared.

    Args:
        path: where.
        tensors: by name.
        told: what else the file says, its metadata.

    Raises:
        RunError: if it cannot be written.
    """
    kept = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    write_file(path, save_tensors(kept, told))


def environment() -> dict[str, Any]:
    """What the numbers were made with; no host, user or path."""
    return {
        "sigmanens": sigmanens.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "system": f"{platform.system()} {platform.machine()}",
    }


def read_config(folder: Path) -> dict[str, Any]:
    """``config.yaml`` of a run.

    Raises:
        RunError: if the folder holds no run.
    """
    return dict(_read(folder, "config.yaml", yaml.safe_load))


def read_inputs(folder: Path) -> dict[str, Any]:
    """``inputs.json`` of a run: how new inputs are read, and the names of the classes.

    Raises:
        RunError: if the folder holds no finished run of ``sigmanens train`` that has it.
    """
    read_metrics(folder)
    if not (Path(folder) / "inputs.json").exists():
        raise RunError(
            f"{folder} has no inputs.json: it is a study, or an older release trained it. Train "
            "again with 'sigmanens train'"
        )
    found = dict(_read(folder, "inputs.json", json.loads))
    if found.get("version") != 1:
        raise RunError(f"{folder}/inputs.json has version {found.get('version')}; expected 1")
    return found


def network_seed(seed: int, index: int = 0) -> int:
    """Seed of network number ``index`` of a training with this seed."""
    return 100 * seed + index


def read_metrics(folder: Path) -> dict[str, Any]:
    """``metrics.json`` of a run.

    Raises:
        RunError: if the run is missing, unfinished or damaged.
    """
    return dict(_read(folder, "metrics.json", json.loads))


def _same(a: Mapping[str, Any], b: Mapping[str, Any], extendable: Collection[str]) -> bool:
    """Whether two configurations are equal but for some keys."""
    first, second = ({k: v for k, v in c.items() if k not in extendable} for c in (a, b))
    return first == second


def _read(folder: Path, name: str, parse: Any) -> Mapping[str, Any]:
    path = Path(folder) / name
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        state = "an unfinished run" if (Path(folder) / "config.yaml").exists() else "no run"
        raise RunError(f"{folder} holds {state}: it has no {name}") from e
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise RunError(f"{path} cannot be read: {e}") from e
    if not isinstance(found, Mapping):
        raise RunError(f"{path} does not hold a mapping: it was altered")
    return found


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"

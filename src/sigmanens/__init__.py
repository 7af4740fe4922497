"""sigmanens: a network's normalisation layers become M members, and its probabilities calibrated.

σN-Ens, "Controllable Diversity in Normalization-Based Implicit Ensembles via Softmax-Temperature
Modulation" (arXiv 2607.23860).
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from sigmanens import diversity, errors
from sigmanens.conversion import rules
from sigmanens.conversion.audit import ConversionReport
from sigmanens.conversion.config import ConversionConfig
from sigmanens.diversity import Diversity
from sigmanens.ensemble.convert import convert, convert_
from sigmanens.ensemble.ensemble import SigmaEnsemble, load
from sigmanens.ensemble.prediction import Prediction
from sigmanens.errors import MissingPackageError, SigmaNensError, SigmaNensWarning
from sigmanens.export.onnx import export_onnx
from sigmanens.export.program import export_program
from sigmanens.training.groups import check_optimizer, param_groups
from sigmanens.training.loss import EnsembleLoss

if TYPE_CHECKING:
    from sigmanens.lab.predicting import TrainedRun

__version__ = "0.1.0"

__all__ = [
    "ConversionConfig",
    "ConversionReport",
    "Diversity",
    "EnsembleLoss",
    "Prediction",
    "SigmaEnsemble",
    "SigmaNensError",
    "SigmaNensWarning",
    "__version__",
    "check_optimizer",
    "convert",
    "convert_",
    "diversity",
    "errors",
    "export_onnx",
    "export_program",
    "load",
    "load_run",
    "param_groups",
    "rules",
]


def load_run(folder: str | PathLike[str]) -> TrainedRun:
    """Open a finished run of ``sigmanens train``, to predict new inputs with its ensemble.

    ``sn.load_run("runs/pets").predict("photos").rows()`` names a class, its probability, and the
    entropies in nats, for each picture below a folder.

    Raises:
        RunError: if the folder holds no finished run. CheckpointError: if its checkpoint does not
            fit. ConfigError, DataError: if its network cannot be built, or its weights are gone.
            MissingPackageError: without the extra ``lab``.
    """
    try:
        from sigmanens.lab.predicting import TrainedRun
    except ModuleNotFoundError as e:
        raise MissingPackageError(f"load_run needs {e.name}: pip install 'sigmanens[lab]'") from e
    return TrainedRun.load(folder)

"""sigmanens: a network's normalisation layers become M members, and its probabilities calibrated.

σN-Ens, "Controllable Diversity in Normalization-Based Implicit Ensembles via Softmax-Temperature
Modulation" (arXiv 2607.23860).
"""

from sigmanens import diversity, errors
from sigmanens.conversion import rules
from sigmanens.conversion.audit import ConversionReport
from sigmanens.conversion.config import ConversionConfig
from sigmanens.diversity import Diversity
from sigmanens.ensemble.convert import convert, convert_
from sigmanens.ensemble.ensemble import SigmaEnsemble, load
from sigmanens.ensemble.prediction import Prediction
from sigmanens.errors import SigmaNensError, SigmaNensWarning
from sigmanens.export.onnx import export_onnx
from sigmanens.export.program import export_program
from sigmanens.training.groups import check_optimizer, param_groups
from sigmanens.training.loss import EnsembleLoss

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
    "param_groups",
    "rules",
]

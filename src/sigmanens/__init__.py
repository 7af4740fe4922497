"""sigmanens: a network's normalisation layers become M members, and its probabilities calibrated.

σN-Ens, "Controllable Diversity in Normalization-Based Implicit Ensembles via Softmax-Temperature
Modulation" (arXiv 2607.23860).
"""

from sigmanens import diversity, errors, rules
from sigmanens.audit import ConversionReport
from sigmanens.checkpoint import load
from sigmanens.convert import convert, convert_
from sigmanens.diversity import Diversity
from sigmanens.ensemble import SigmaEnsemble
from sigmanens.errors import SigmaNensError, SigmaNensWarning
from sigmanens.objective import EnsembleLoss, check_optimizer, param_groups
from sigmanens.onnx import export_onnx
from sigmanens.prediction import Prediction
from sigmanens.program import export_program
from sigmanens.timing import measure_schedule

__version__ = "0.1.0"

__all__ = [
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
    "measure_schedule",
    "param_groups",
    "rules",
]

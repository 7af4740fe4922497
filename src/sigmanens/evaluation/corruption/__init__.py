"""Corrupted pictures and texts, and the published corrupted sets. Needs the extra ``lab``.

The standard corruptions of pictures at five severities, seeded per picture (:func:`corrupt`); three
corruptions of text (:func:`corrupt_text`); readers of the layouts of CIFAR-10-C
(:func:`read_cifar_c`) and ImageNet-C (:func:`read_imagenet_c`).
"""

from importlib.util import find_spec

from sigmanens.errors import MissingPackageError

_absent = [
    name
    for name, module in (("numpy", "numpy"), ("scipy", "scipy"), ("pillow", "PIL"))
    if find_spec(module) is None
]
if _absent:
    raise MissingPackageError(
        f"sigmanens.evaluation.corruption needs {' and '.join(_absent)}: "
        "pip install 'sigmanens[lab]'"
    )

from sigmanens.evaluation.corruption.checks import SEVERITIES  # noqa: E402
from sigmanens.evaluation.corruption.files import (  # noqa: E402
    PictureFiles,
    read_cifar_c,
    read_imagenet_c,
)
from sigmanens.evaluation.corruption.pictures import corrupt  # noqa: E402
from sigmanens.evaluation.corruption.tables import (  # noqa: E402
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    TABLES,
    nearest_table,
)
from sigmanens.evaluation.corruption.text import TEXT_CORRUPTIONS, corrupt_text  # noqa: E402

__all__ = [
    "CORRUPTIONS",
    "EXTRA_CORRUPTIONS",
    "SEVERITIES",
    "TABLES",
    "TEXT_CORRUPTIONS",
    "PictureFiles",
    "corrupt",
    "corrupt_text",
    "nearest_table",
    "read_cifar_c",
    "read_imagenet_c",
]

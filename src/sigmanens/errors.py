"""Errors of sigmanens: each derives from :class:`SigmaNensError` and the fitting built-in."""

from __future__ import annotations

import sys
import warnings


class SigmaNensError(Exception):
    """Base of every error raised by sigmanens."""


class SigmaNensWarning(UserWarning):
    """Base of every warning issued by sigmanens."""


class InputError(SigmaNensError, ValueError):
    """An argument or a tensor has the wrong value, shape or type."""


class NonFiniteError(InputError):
    """NaN or infinity where a finite number is needed."""


class OutsidePassError(SigmaNensError, RuntimeError):
    """A converted layer was called outside a pass of its ensemble."""


class ConversionError(SigmaNensError, ValueError):
    """A network cannot be converted as asked."""


class NoNormError(ConversionError):
    """The network has no normalisation layer, or ``layers`` selects none."""


class UnsupportedNormError(ConversionError, TypeError):
    """A normalisation layer of a class that no rule covers."""


class AlreadyConvertedError(ConversionError):
    """The network holds σNorm layers already."""


class HeadNotFoundError(ConversionError):
    """The classification head was not found by itself or under the given name."""


class DiversityError(SigmaNensError, ValueError):
    """The diversity penalty has no meaning for this ensemble or these settings."""


class CheckpointError(SigmaNensError, RuntimeError):
    """A checkpoint cannot be written or read."""


class ExportError(SigmaNensError, RuntimeError):
    """A network cannot be exported, or what was exported computes something else."""


class MissingPackageError(SigmaNensError, ImportError):
    """A package that only an extra installs is not there."""


class ConfigError(SigmaNensError, ValueError):
    """A configuration file or a command-line option is wrong."""


class DataError(SigmaNensError, ValueError):
    """A data set is empty, incomplete or not in the expected layout."""


class MixedSizesError(DataError):
    """Pictures differ in size, and none was given to bring them to."""


class RunError(SigmaNensError, RuntimeError):
    """A run folder is missing, incomplete or already in use."""


def warn(message: str) -> None:
    """Issue a :class:`SigmaNensWarning` that points at the caller's line, outside this package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and _is_inner(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, SigmaNensWarning, stacklevel=level)


def _is_inner(module: str) -> bool:
    return module.partition(".")[0] in ("sigmanens", "torch", "contextlib")

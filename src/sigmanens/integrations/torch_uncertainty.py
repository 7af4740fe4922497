"""An ensemble for the routines of torch-uncertainty, which then measure it like their own methods::

    routine = ClassificationRoutine(
        RoutineAdapter(ensemble), num_classes=10, is_ensemble=True,
        format_batch_fn=RepeatTarget(ensemble.num_members),
    )
    trainer.test(routine, loader)

For training, use :mod:`sigmanens.integrations.lightning` or a loop of your own: a routine's loss
knows no diversity penalty. Nothing of torch-uncertainty is imported here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.ensemble.prediction import Prediction, logits_of
from sigmanens.errors import InputError

__all__ = ["RoutineAdapter"]


class RoutineAdapter(nn.Module):
    """Members folded into the batch, as torch-uncertainty's routines unfold them.

    ``forward(x)`` gives logits (M · B, C), all samples of member 0 first, which a routine splits by
    "(m b) c" and averages after the softmax; with ``average=True`` the log of the averaged,
    tempered probabilities (B, C), nats.

    Args:
        ensemble: of a network with one label per sample.
        average: average here, for a routine with ``is_ensemble=False``. Post-processing methods and
            logit-based OOD scores, which routines refuse for ensembles, then apply; disagreement
            and mutual information are not computed.

    Raises:
        InputError: if ``ensemble`` is no SigmaEnsemble; in ``forward``, if logits are not
            (M, B, C), the ensemble's task is not multiclass (routines take a softmax), or it has a
            temperature that the routine's average would ignore.
    """

    def __init__(self, ensemble: SigmaEnsemble, average: bool = False) -> None:
        super().__init__()
        if not isinstance(ensemble, SigmaEnsemble):
            raise InputError(
                f"got a {type(ensemble).__name__} in the place of the ensemble; expected the "
                "SigmaEnsemble that sigmanens.ensemble.convert returns"
            )
        self.ensemble = ensemble
        self.average = average

    @property
    def num_estimators(self) -> int:
        """Estimators that the routine finds in the logits: M, or 1 where they are averaged."""
        return 1 if self.average else self.ensemble.num_members

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (M · B, C), member-major; or log-probabilities (B, C)."""
        if self.ensemble.task not in (None, "multiclass"):
            raise InputError(
                f"the task of the ensemble is {self.ensemble.task}; expected multiclass: the "
                "routines of torch-uncertainty take a softmax over the logits"
            )
        temperature = float(self.ensemble.temperature)
        if temperature != 1.0 and not self.average:
            raise InputError(
                f"the ensemble has a temperature of {temperature:g}, which applies to the averaged "
                "distribution, but a routine with is_ensemble=True averages by itself. Use "
                "average=True with is_ensemble=False, or ensemble.temperature.fill_(1)"
            )
        logits = logits_of(self.ensemble(*args, **kwargs))
        if logits.dim() != 3:
            raise InputError(
                f"member logits have shape {tuple(logits.shape)}; expected (M, B, C), one row per "
                "sample"
            )
        if self.average:
            return Prediction.from_logits(logits, temperature).log_probs
        return logits.flatten(0, 1)

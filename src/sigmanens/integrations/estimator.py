"""An ensemble as a scikit-learn classifier: ``fit``, ``predict_proba``, pipelines, searches.

For arrays that fit in memory. Whatever a loop of your own should decide (augmentation, mixed
precision, several devices) is not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from sigmanens.diversity import Diversity
from sigmanens.diversity.defaults import DEFAULTS
from sigmanens.ensemble.convert import convert
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.ensemble.prediction import Prediction, logits_of
from sigmanens.errors import InputError, warn
from sigmanens.evaluation import fit_temperature
from sigmanens.seeding import own_random_state
from sigmanens.training.groups import param_groups
from sigmanens.training.loss import EnsembleLoss

__all__ = ["SigmaEnsembleClassifier", "Uncertainty"]

Array = np.ndarray[Any, Any]
Network = nn.Module | Callable[[int, int], nn.Module] | None


class Uncertainty(NamedTuple):
    """How uncertain B predictions are, and why: entropy = expected_entropy + modulation.

    Attributes:
        entropy: of the averaged, untempered distribution: (B,), nats.
        expected_entropy: mean entropy of the members: (B,), nats.
        modulation: mutual information of label and member: (B,), nats, ≥ 0.
    """

    entropy: Array
    expected_entropy: Array
    modulation: Array


def default_network(features: int, classes: int, width: int = 64) -> nn.Module:
    """For tables: two hidden layers with BatchNorm, and one on the inputs, whatever their units."""
    return nn.Sequential(
        nn.BatchNorm1d(features), nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes),
    )  # fmt: skip


class SigmaEnsembleClassifier(ClassifierMixin, BaseEstimator):
    """σN-Ens (arXiv 2607.23860) with the interface of scikit-learn.

    ``fit`` converts a copy of the network, trains it by SGD with momentum and a cosine schedule,
    and fits a temperature on data it held out.

    Fits of one process take turns, for torch draws for all threads from one generator: a fit with a
    fixed ``random_state`` is the same with any ``n_jobs`` and backend, but threads (joblib's
    "threading" backend) do not make a search faster. Processes, joblib's default, do.

    Args:
        network: a network with one logit per class, trained or not, which is never changed; a
            callable ``(X.shape[1], number of classes) -> network``; or None for a small
            perceptron on tables.
        members: M ≥ 1.
        tau: diversity temperature τ > 0, or a function of the training's progress.
        diversity_weight: λ ≥ 0 of the diversity penalty, or a function of progress; 0 leaves it
            out.
        epochs: passes over the training data.
        batch_size: samples per step.
        lr: initial learning rate of the weights; scales take multiples of it.
        weight_decay: of the weights; scales, norms and biases have none.
        scale_lr_mult: factor on ``lr`` for the scales; by kind of norm if None.
        head_lr_mult: factor on ``lr`` for the members' own heads; 1 if None.
        validation_fraction: part of the data, in [0, 1), held out (stratified) to fit the
            temperature; 0 trains on everything and leaves the temperature at 1. Data that cannot be
            split by class are all trained on, and a warning says so.
        class_weight: factor on the loss of each class: a mapping from label to factor (1 where it
            has none), "balanced" for n / (C · count of the class), or None.
        convert_options: further keyword arguments of :func:`sigmanens.convert`.
        device: to train and predict on; where the network is if None.
        random_state: int, RandomState or None. Torch's own random state is left as it was.

    Attributes:
        classes_: the labels in the order of the columns of ``predict_proba``: (C,).
        ensemble_: the trained :class:`~sigmanens.SigmaEnsemble`, in evaluation mode.
        temperature_: that was fitted, or 1.
        loss_curve_: mean training loss of each epoch, penalty included.
        n_features_in_: X.shape[1].
    """

    def __init__(
        self,
        network: Network = None,
        *,
        members: int = 4,
        tau: float | Callable[[float], float] = DEFAULTS["estimator"].tau,
        diversity_weight: float | Callable[[float], float] = DEFAULTS["estimator"].weight,
        epochs: int = 30,
        batch_size: int = 64,
        lr: float = 0.05,
        weight_decay: float = 5e-4,
        scale_lr_mult: float | None = None,
        head_lr_mult: float | None = None,
        validation_fraction: float = 0.1,
        class_weight: Mapping[Any, float] | str | None = None,
        convert_options: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.network = network
        self.members = members
        self.tau = tau
        self.diversity_weight = diversity_weight
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.scale_lr_mult = scale_lr_mult
        self.head_lr_mult = head_lr_mult
        self.validation_fraction = validation_fraction
        self.class_weight = class_weight
        self.convert_options = convert_options
        self.device = device
        self.random_state = random_state

    # -- fitting ---------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SigmaEnsembleClassifier:
        """Convert, train and calibrate.

        A sample's weight v is ``sample_weight`` times the factor of its class. The loss is
        Σ v ℓ / Σ v over the data, and so is the NLL that sets the temperature. Samples of weight 0
        are left out.

        Args:
            X: samples (B, features) or (B, channels, …), array or tensor; read as float32.
            y: labels (B,) of any type that can be sorted.
            sample_weight: factors ≥ 0 on the samples' losses (B,), or None for 1.

        Raises:
            InputError: for a parameter out of its range, several labels per sample, or a network
                whose logits do not fit the labels. Errors of ``convert`` as named there.
                ValueError: as scikit-learn raises it for bad arrays.
        """
        self._check_parameters()
        y = _as_array(y)
        if getattr(y, "ndim", 0) == 2 and y.shape[1] > 1:
            raise InputError(
                f"y has several labels per sample, shape {tuple(y.shape)}; expected one, (B,). "
                "Train an ensemble with EnsembleLoss(nn.BCEWithLogitsLoss()) instead"
            )
        X, y = validate_data(self, _as_array(X), y, dtype=np.float32, allow_nd=True)
        check_classification_targets(y)
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(_as_array(sample_weight), X, ensure_non_negative=True)
            X, y, weights = X[weights > 0], y[weights > 0], weights[weights > 0]
        self.classes_, indices = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(f"y has one class, {self.classes_[0]!r}; expected at least 2 classes")
        if self.class_weight is not None:
            factors = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            if not (np.isfinite(factors).all() and (factors >= 0).all() and factors.any()):
                raise InputError(
                    f"class_weight gives factors {factors.tolist()}; expected finite numbers of at "
                    "least 0, and one above"
                )
            weights = factors[indices] if weights is None else weights * factors[indices]
            X, indices, weights = X[weights > 0], indices[weights > 0], weights[weights > 0]
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        train, held_out = self._split(indices, seed)
        cards = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        with own_random_state(*cards):
            torch.manual_seed(seed)
            generator = torch.Generator().manual_seed(seed)
            network = self._network(X.shape[1])
            options = {"generator": generator, **(self.convert_options or {})}
            members = self.members
            if isinstance(members, np.integer):  # from a search over an array
                members = int(members)
            ensemble = convert(network, members, **options)
            if self.device is not None:
                ensemble.to(self.device)
            loss = F.cross_entropy if weights is None else _Weighted(weights[train])
            x, labels = _tensor(X[train]), torch.from_numpy(indices[train])
            self._train(ensemble, x, labels, loss, generator)
            self.ensemble_ = ensemble.eval()
            self.temperature_ = 1.0
            if len(held_out):
                log_probs = self._predict(X[held_out], 1.0).log_probs.cpu()
                self.temperature_ = fit_temperature(
                    log_probs, torch.from_numpy(indices[held_out]),
                    None if weights is None else weights[held_out],
                )  # fmt: skip
        ensemble.temperature.fill_(self.temperature_)
        return self

    def _check_parameters(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise InputError(f"{name} is {value!r}; expected an integer ≥ 1")
        if isinstance(self.class_weight, str) and self.class_weight != "balanced":
            raise InputError(
                f"class_weight is {self.class_weight!r}; expected a mapping from label to factor, "
                "'balanced' or None"
            )
        if not 0 <= self.validation_fraction < 1:
            raise InputError(
                f"validation_fraction is {self.validation_fraction!r}; expected a number in [0, 1)"
            )

    def _split(self, indices: Array, seed: int) -> tuple[Array, Array]:
        every = np.arange(len(indices))
        if not self.validation_fraction:
            return every, every[:0]
        try:
            train, held_out = train_test_split(
                every, test_size=self.validation_fraction, stratify=indices, random_state=seed
            )
        except ValueError as error:
            warn(
                f"no temperature is fitted: validation_fraction={self.validation_fraction} of "
                f"{len(every)} samples in {len(self.classes_)} classes cannot be held out "
                f"({error}). Give more samples, or validation_fraction=0"
            )
            return every, every[:0]
        return train, held_out

    def _network(self, features: int) -> nn.Module:
        classes = len(self.classes_)
        if isinstance(self.network, nn.Module):
            return self.network
        make = default_network if self.network is None else self.network
        if not callable(make):
            raise InputError(
                f"network is a {type(make).__name__}; expected an nn.Module, a callable "
                "(features, classes) -> nn.Module, or None"
            )
        return make(features, classes)

    def _train(
        self,
        ensemble: SigmaEnsemble,
        x: Tensor,
        y: Tensor,
        loss: Callable[..., Tensor],
        generator: torch.Generator,
    ) -> None:
        penalty = None
        if self.diversity_weight and self.members > 1:
            penalty = Diversity(tau=self.tau, weight=self.diversity_weight)
        loss_fn = EnsembleLoss(loss, diversity=penalty)
        groups = param_groups(
            ensemble, self.lr, self.weight_decay, self.scale_lr_mult, self.head_lr_mult
        )
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        steps = self.epochs * sum(1 for _ in _batches(torch.arange(len(x)), self.batch_size))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
        )
        device = next(ensemble.parameters()).device
        self.loss_curve_ = []
        step = 0
        ensemble.train()
        for _ in range(self.epochs):
            total = 0.0
            for rows in _batches(torch.randperm(len(x), generator=generator), self.batch_size):
                inputs, labels = x[rows].to(device), y[rows].to(device)
                optimizer.zero_grad()
                if penalty is not None:
                    penalty.progress = step / steps
                logits = logits_of(ensemble(inputs))
                self._check_logits(logits)
                if isinstance(loss, _Weighted):
                    loss.rows = rows
                value = loss_fn(logits, labels, ensemble)
                value.backward()
                optimizer.step()
                schedule.step()
                step += 1
                total += float(value.detach()) * len(rows)
            self.loss_curve_.append(total / len(x))

    def _check_logits(self, logits: Tensor) -> None:
        if logits.dim() != 3 or logits.shape[2] != len(self.classes_):
            raise InputError(
                f"the network gives logits {tuple(logits.shape[1:])} for {len(self.classes_)} "
                f"classes in y; expected (B, {len(self.classes_)}). A callable "
                "(features, classes) -> network is told their number"
            )

    # -- predicting ------------------------------------------------------------------------------

    def predict(self, X: Any) -> Array:
        """The most probable class of each sample: (B,)."""
        best = self.predict_proba(X).argmax(1)
        predicted: Array = self.classes_[best]
        return predicted

    def predict_proba(self, X: Any) -> Array:
        """Averaged probabilities, temperature applied: (B, C), in the order of ``classes_``."""
        probs: Array = self._predict(self._checked(X)).probs.cpu().numpy()
        return probs

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Entropy of each prediction, split into what members doubt and what they dispute."""
        found = self._predict(self._checked(X))
        parts = (found.entropy, found.expected_entropy, found.modulation)
        return Uncertainty(*(part.cpu().numpy() for part in parts))

    def _checked(self, X: Any) -> Array:
        check_is_fitted(self)
        checked: Array = validate_data(
            self, _as_array(X), dtype=np.float32, allow_nd=True, reset=False
        )
        return checked

    def _predict(self, x: Array, temperature: float | None = None) -> Prediction:
        device = next(self.ensemble_.parameters()).device
        parts = []
        for part in _tensor(x).split(max(self.batch_size, 256)):
            parts.append(self.ensemble_.predict(part.to(device), temperature=temperature))
        return Prediction.cat(parts)


class _Weighted:
    """Cross-entropy of one member, each sample times its weight over the mean weight of all."""

    def __init__(self, weights: Array) -> None:
        self.weights = torch.from_numpy(weights / weights.mean()).float()
        self.rows = torch.arange(0)  # samples of the batch

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, y, reduction="none")
        return (losses * self.weights[self.rows].to(losses)).mean()


def _as_array(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _tensor(x: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def _batches(order: Tensor, size: int) -> Iterator[Tensor]:
    """Rows of each batch; a single one left over joins the batch before it, for BatchNorm."""
    parts = list(order.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    yield from parts

r"""Last-layer Laplace (arXiv 2106.14806): a Gaussian over the head's weights, found after training.

.. math:: p(W \mid D) \approx N\bigl(W_\mathrm{MAP},\ (H + \delta I)^{-1}\bigr)

with the generalised Gauss-Newton H of the head and the prior precision δ that maximises the
marginal likelihood. The work is done by laplace-torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sigmanens.baselines.base import Rival, base_network, check_count, import_library
from sigmanens.baselines.layers import last_layer
from sigmanens.ensemble.prediction import logits_of
from sigmanens.errors import InputError

__all__ = ["LastLayerLaplace", "laplace"]

STRUCTURES = ("kron", "full", "diag")


class LastLayerLaplace(Rival):
    """One network with a posterior over its head; made by :func:`laplace`.

    Train it as one network, then call :meth:`fit` on the training data. A later training or move
    to another device needs a new :meth:`fit`.
    """

    def __init__(
        self, network: nn.Module, head: str, samples: int | None, structure: str, seed: int
    ) -> None:
        super().__init__(network, 1 if samples is None else samples)
        self.head, self.samples, self.structure, self.seed = head, samples, structure, seed
        self._posterior: Any = None
        self._heads = torch.empty(0)

    def fit(self, x: Tensor, y: Tensor, batch_size: int = 256) -> float:
        """Fit the posterior to training data and its prior to the marginal likelihood.

        Args:
            x: inputs (N, …).
            y: class indices (N,), int64.
            batch_size: samples in a pass.

        Returns:
            the prior precision δ.
        """
        library = import_library("laplace", "laplace-torch")
        self.eval()
        device = next(self.network.parameters()).device
        posterior = library.Laplace(
            _Logits(self.network),
            "classification",
            subset_of_weights="last_layer",
            hessian_structure=self.structure,
            last_layer_name=f"network.{self.head}",
        )
        data = DataLoader(TensorDataset(x.to(device), y.to(device)), batch_size=batch_size)
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="By default `link_approx` is `probit`")
            posterior.fit(data)
            posterior.optimize_prior_precision(
                pred_type="glm", method="marglik", prior_structure="scalar"
            )
        if self.samples is not None:
            generator = torch.Generator(device).manual_seed(self.seed)
            self._heads = posterior.sample(self.samples, generator).detach()
        self._posterior = posterior
        return float(posterior.prior_precision)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (1, B, C) in training mode.

        In evaluation mode log-probabilities (1, B, C) of the probit approximation, nats, or the
        logits (S, B, C) of S heads drawn from the posterior, the same in every call.

        Raises:
            InputError: in evaluation mode before :meth:`fit`.
        """
        if self.training:
            return logits_of(self.network(x)).unsqueeze(0)
        if self._posterior is None:
            raise InputError(
                "the Laplace posterior was not fitted: call fit(x, y) with the training data first"
            )
        if self.samples is None:
            probs = self._posterior(x, pred_type="glm", link_approx="probit")
            return probs.clamp_min(torch.finfo(probs.dtype).tiny).log().unsqueeze(0)
        _, features = self._posterior.model.forward_with_features(x)
        weight, bias = self._drawn_heads(features.shape[-1])
        return torch.einsum("bf,scf->sbc", features.to(weight.dtype), weight) + bias

    def _drawn_heads(self, inputs: int) -> tuple[Tensor, Tensor | float]:
        """Weights (S, C, F) and biases (S, 1, C) of the heads drawn by :meth:`fit`."""
        has_bias = self.network.get_submodule(self.head).bias is not None
        outputs = self._heads.shape[1] // (inputs + has_bias)
        weight = self._heads[:, : outputs * inputs].unflatten(1, (outputs, inputs))
        return weight, self._heads[:, None, outputs * inputs :] if has_bias else 0.0


class _Logits(nn.Module):
    """A network that returns its logits and nothing else, as laplace-torch needs it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.network(x))


def laplace(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    *,
    samples: int | None = None,
    structure: str = "kron",
    head_name: str | Sequence[str] | None = None,
    seed: int = 0,
) -> LastLayerLaplace:
    """One network with laplace-torch's last-layer posterior (arXiv 2106.14806).

    Args:
        model_or_factory: a network of one input tensor, which is copied, or a function that makes
            one; trained or to be trained.
        samples: S ≥ 1 heads to draw as members, or None for the closed form (M = 1).
        structure: of H: "kron" (Kronecker-factored), "full" or "diag".
        head_name: the Linear that makes the logits, if it is not found by itself.
        seed: of the samples.

    Raises:
        MissingPackageError: without laplace-torch. HeadNotFoundError: if no head is found.
        InputError: for an argument out of its range.
    """
    if samples is not None:
        check_count("samples", samples)
    if structure not in STRUCTURES:
        raise InputError(f"structure is {structure!r}; expected one of {', '.join(STRUCTURES)}")
    import_library("laplace", "laplace-torch")
    network = base_network(model_or_factory)
    return LastLayerLaplace(network, last_layer(network, head_name), samples, structure, seed)

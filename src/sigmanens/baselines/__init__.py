"""The rivals, behind one interface: ``forward`` gives (M, B, C), ``num_members`` is M."""

from sigmanens.baselines.film import film_ensemble
from sigmanens.baselines.separate import SeparateNetworks

__all__ = ["SeparateNetworks", "film_ensemble"]

"""Ways to train by name: parts of a configuration that ``sigmanens train --recipe NAME`` reads."""

from __future__ import annotations

from pathlib import Path

from sigmanens.errors import ConfigError

__all__ = ["RECIPES", "recipe_path"]

_FOLDER = Path(__file__).parent
RECIPES = tuple(sorted(p.stem for p in _FOLDER.glob("*.yaml")))


def recipe_path(name: str) -> Path:
    """The YAML file of a recipe.

    Raises:
        ConfigError: if there is none of that name.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"there is no recipe {name!r}; there are {', '.join(RECIPES)}. Single values are given "
            "as in --recipe.lr 0.05, or in the file of --config"
        )
    return _FOLDER / f"{name}.yaml"

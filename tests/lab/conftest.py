"""What the tests of the lab share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what ``datasets`` prepares out of the user's cache."""
    if importlib.util.find_spec("datasets") is None:
        yield
        return
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        datasets.disable_progress_bars()
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Networks of a few steps often predict by chance, which sets no temperature."""
    for item in items:
        if "tests/lab/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore:the .* samples set no temperature"))

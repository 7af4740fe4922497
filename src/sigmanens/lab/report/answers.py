"""Predictions of single inputs as a page: the pictures or texts, and how uncertain each is."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sigmanens.lab.report.template import document, write_page

SIDE = 160
"""Largest height and width of a picture on the page, in pixels."""


def write_answers(
    rows: Sequence[Mapping[str, Any]], examples: Sequence[Any], said: str, path: Path
) -> Path:
    """Write a page of predictions, whole or not at all.

    Args:
        rows: of :meth:`sigmanens.lab.predicting.Answers.rows`.
        examples: the inputs: paths and Pillow pictures, or texts.
        said: about the rule of abstention.
        path: the file.

    Raises:
        RunError: if it cannot be written.
    """
    heads = [key.replace("_", " ") for key in rows[0]]
    pictures = [None if isinstance(one, str) else thumbnail(one) for one in examples]
    text = document(
        "answers.html.j2", title=f"sigmanens predict: {len(rows)} inputs", heads=heads, said=said,
        rows=list(zip(rows, pictures, strict=True)),
    )  # fmt: skip
    return write_page(text, path)


def thumbnail(picture: Any) -> str:
    """A small copy of a file or a Pillow picture, as a ``data:`` URI."""
    from PIL import Image

    if isinstance(picture, Path):
        with Image.open(picture) as opened:
            small = opened.convert("RGB")
    else:
        small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=90, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"

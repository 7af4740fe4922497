"""Draw the contact sheet of docs/corruption.md, and measure how long the corruptions take.

    python docs/make_corruption.py sheet     # docs/corruption.png
    python docs/make_corruption.py time      # docs/corruption.json, then the table in the page

The picture is a part of scikit-learn's ``china.jpg`` (CC BY).
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn.functional import interpolate

from sigmanens.evaluation.corruption import CORRUPTIONS, EXTRA_CORRUPTIONS, SEVERITIES, corrupt

DOCS = Path(__file__).resolve().parent
NAMES = CORRUPTIONS + EXTRA_CORRUPTIONS
TIMED = {32: 200, 64: 50, 224: 10}
"""Side in pixels → number of pictures that are corrupted for the time table."""


def picture(side: int) -> Tensor:
    """(1, 3, side, side) uint8: the middle of ``china.jpg``."""
    china = torch.from_numpy(load_sample_images().images[0].copy()).permute(2, 0, 1)[None]
    middle = china[:, :, 60:396, 150:486].float()
    return interpolate(middle, size=(side, side), mode="area").round().to(torch.uint8)


def sheet(target: Path, cell: int = 96) -> None:
    """All corruptions of one picture: five severities at 224 px (shown at half size), then the five
    at 32 px (shown enlarged).
    """
    gap, title = 4, 130
    columns = 2 * len(SEVERITIES) + 2
    width = title + columns * (cell + gap) + 2 * gap
    page = Image.new("RGB", (width, 24 + len(NAMES) * (cell + gap)), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(14)
    heads = ["224 px", *map(str, SEVERITIES), "32 px", *map(str, SEVERITIES)]
    large, small = picture(224), picture(32)

    def left(column: int) -> int:
        return title + column * (cell + gap) + (3 * gap if column > len(SEVERITIES) else 0)

    for column, head in enumerate(heads):
        pen.text((left(column), 4), head, fill="black", font=font)
    for row, name in enumerate(NAMES):
        top = 24 + row * (cell + gap)
        pen.text((2, top + cell // 2 - 8), name.replace("_", " "), fill="black", font=font)
        shown = [large, *(corrupt(large, name, s) for s in SEVERITIES)]
        shown += [small, *(corrupt(small, name, s) for s in SEVERITIES)]
        for column, tensor in enumerate(shown):
            image = Image.fromarray(tensor[0].permute(1, 2, 0).numpy())
            how = Image.Resampling.BOX if image.width > cell else Image.Resampling.NEAREST
            page.paste(image.resize((cell, cell), how), (left(column), top))
    colours = page.quantize(256, method=Image.Quantize.FASTOCTREE)
    page.quantize(palette=colours).save(target, optimize=True)  # dithered


def measure() -> dict[str, object]:
    """CPU milliseconds per picture, mean over the severities, for each side and corruption."""
    torch.set_num_threads(1)
    rows: dict[str, dict[str, float]] = {}
    for side, count in TIMED.items():
        pictures = picture(side).repeat(count, 1, 1, 1)
        rows[str(side)] = {}
        for name in NAMES:
            corrupt(pictures[:2], name, 1)  # what is made once, such as the textures of frost
            start = time.process_time()
            for severity in SEVERITIES:
                corrupt(pictures, name, severity)
            spent = time.process_time() - start
            rows[str(side)][name] = round(1e3 * spent / (count * len(SEVERITIES)), 3)
    packages = {"numpy": np.__version__, "torch": torch.__version__}
    return {
        "command": "python docs/make_corruption.py time",
        "unit": "CPU milliseconds per picture and severity, one thread",
        "pictures": {str(side): count for side, count in TIMED.items()},
        "environment": {"python": platform.python_version(), **packages},
        "rows": rows,
    }


def table(measured: dict[str, object]) -> str:
    """The measured times in Markdown, with what 2,000 pictures × 19 × 5 take."""
    rows = measured["rows"]
    assert isinstance(rows, dict)
    lines = ["| corruption | " + " | ".join(f"{s} px, ms" for s in rows) + " |"]
    lines.append("| --- |" + " --- |" * len(rows))
    for name in NAMES:
        lines.append(f"| `{name}` | " + " | ".join(f"{rows[s][name]:.2f}" for s in rows) + " |")
    totals = [sum(rows[s].values()) * len(SEVERITIES) * 2000 / 6e4 for s in rows]
    total = " | ".join(f"{minutes:.1f} min" for minutes in totals)
    lines.append(f"| all, 5 severities, 2,000 pictures | {total} |")
    return "\n".join(lines)


def main(what: str) -> int:
    if what == "sheet":
        sheet(DOCS / "corruption.png")
        return 0
    if what != "time":
        print(__doc__)
        return 2
    measured = measure()
    (DOCS / "corruption.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    page = DOCS / "corruption.md"
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- time -->")
    after = rest.partition("<!-- /time -->")[2]
    text = f"{before}<!-- time -->\n{table(measured)}\n<!-- /time -->{after}"
    page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else ""))

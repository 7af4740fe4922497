"""Photograph sections of a run's report with headless Chromium, for the README.

    python docs/make_picture.py runs/demo/report.html docs/demo.png reliability severity

Needs ``chromium`` (or ``google-chrome``) on the path and Pillow.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=10000",
)


def main(report: Path, target: Path, sections: list[str]) -> int:
    """Write the picture; 1 without a browser."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        print("no chromium or google-chrome on the path")
        return 1
    kept = ", ".join(f"#{name}" for name in sections)
    style = f"<style>header, footer, section:not({kept}), .every {{ display: none !important }}"
    style += "</style>"
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        text = report.read_text(encoding="utf-8")
        page.write_text(text.replace("</head>", style + "</head>", 1), encoding="utf-8")
        subprocess.run(
            [
                browser, *FLAGS, f"--user-data-dir={folder}/profile", "--window-size=1240,2400",
                f"--screenshot={shot}", page.as_uri(),
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        picture = Image.open(shot).convert("RGB")
    blank = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
    box = ImageChops.difference(picture, blank).getbbox()
    if box is None:
        print(f"{report} shows none of {', '.join(sections)}")
        return 1
    left, top, right, bottom = box
    around = (max(left - 12, 0), max(top - 12, 0), right + 12, min(bottom + 12, picture.height))
    picture.crop(around).quantize(128).save(target, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))

"""How fast and how large: `python -m benchmarks --out FILE` measures, `--page` writes the page."""

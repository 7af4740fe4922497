"""One accelerator, under ten minutes: `python -m benchmarks.gpu --out FILE`.

ResNet-50 and ViT-B/16 at 224 pixels, bfloat16 autocast, M=4: a training step and a prediction by
each schedule, eager and compiled, by CUDA graphs, against four separate networks; peak memory.
Prepared for the day one is at hand: it has not been run on one. `--tiny` runs the same code in
small on whatever device there is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.lab.backbones.registry import build_backbone

__all__ = ["main"]

MEMBERS = 4
CLASSES = 100
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-50": ("torchvision/resnet50", {}),
    "ViT-B/16": ("timm/vit_base_patch16_224", {}),
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-8": ("resnet8", {}),
    "ViT, 1 block": ("timm/vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 1}),
}
WAYS = ("separate", "folded", "sequential", "2 a pass")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=540.0, help="nothing new after this many")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        print("no CUDA device is here; --tiny tries the code on the CPU", file=sys.stderr)
        return 1
    end = time.perf_counter() + options.seconds
    rows: list[dict[str, Any]] = []
    for name, (backbone, arguments) in (TINY if options.tiny else NETWORKS).items():

        def make(b: str = backbone, a: dict[str, Any] = arguments) -> nn.Module:
            return build_backbone(b, num_classes=CLASSES, **a).to(device)

        for compiled in (False, True)[: 1 if options.no_compile else 2]:
            if time.perf_counter() < end:
                rows += _network(name, make, device, compiled, options)
        if device.type == "cuda" and time.perf_counter() < end:
            rows += _graphed(name, make, device, options)
        facts = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "members": MEMBERS,
            "batch": options.batch,
            "rows": rows,
        }
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(options.out.read_text())
    return 0


def _data(device: torch.device, options: Any) -> tuple[Tensor, Tensor]:
    size = 32 if options.tiny else 224
    x = torch.randn(options.batch, 3, size, size, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    return x, torch.randint(CLASSES, (options.batch,), device=device)


def _network(
    name: str, make: Callable[[], nn.Module], device: torch.device, compiled: bool, options: Any
) -> list[dict[str, Any]]:
    x, y = _data(device, options)
    rows = []
    for way in WAYS:
        if compiled and way == "2 a pass":
            continue  # lies between the others, and compiling takes time
        step, predict = _contestant(way, make, device, compiled, x, y)
        for what, function in (("train", step), ("predict", predict)):
            seconds, peak = _timed(function, device, options.runs)
            rows.append(
                {"network": name, "way": way, "what": what, "compiled": compiled}
                | {"seconds": seconds, "peak_bytes": peak}
            )
    return rows


def _contestant(
    way: str, make: Callable[[], nn.Module], device: torch.device, compiled: bool, x: Any, y: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    def cast() -> Any:
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def prepared(network: nn.Module) -> nn.Module:
        return network.to(memory_format=torch.channels_last).train()

    if way == "separate":
        networks = [prepared(make()) for _ in range(MEMBERS)]
        calls: list[Any] = [torch.compile(n) if compiled else n for n in networks]
        optimizers = [torch.optim.SGD(n.parameters(), lr=0.01, momentum=0.9) for n in networks]

        def step() -> None:
            for network, call, optimizer in zip(networks, calls, optimizers, strict=True):
                network.train()
                optimizer.zero_grad()
                with cast():
                    loss = F.cross_entropy(call(x), y)
                loss.backward()
                optimizer.step()

        @torch.no_grad()
        def predict() -> Tensor:
            with cast():
                return torch.stack([n.eval()(x).softmax(-1) for n in networks]).mean(0)

        return step, predict

    schedule: Any = 2 if way == "2 a pass" else way
    ensemble = sn.convert(make(), MEMBERS, schedule=schedule)
    prepared(ensemble)
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.1, weight=1e-4))
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, lr=0.01), momentum=0.9)
    if compiled:
        ensemble.network.compile()  # for predict and backward too

    def step_of_members() -> None:
        ensemble.train()
        optimizer.zero_grad()
        with cast():
            if way == "sequential":
                ensemble.backward(x, y, loss_fn)
            else:
                loss_fn(ensemble(x), y, ensemble).backward()
        optimizer.step()

    def predict_of_members() -> object:
        with cast():
            return ensemble.predict(x)

    return step_of_members, predict_of_members


def _graphed(
    name: str, make: Callable[[], nn.Module], device: torch.device, options: Any
) -> list[dict[str, Any]]:
    """A folded prediction of one sample replayed as a CUDA graph."""
    options = argparse.Namespace(**vars(options) | {"batch": 1})
    x, _ = _data(device, options)
    ensemble = sn.convert(make(), MEMBERS, schedule="folded").eval()
    rows = []
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
        ensemble(x)  # checks come before the capture
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                ensemble(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ensemble(x)
        for way, function in (("folded", lambda: ensemble(x)), ("folded, graph", graph.replay)):
            seconds, peak = _timed(function, device, options.runs)
            rows.append(
                {"network": name, "way": way, "what": "predict, B=1", "compiled": False}
                | {"seconds": seconds, "peak_bytes": peak}
            )
    return rows


def _timed(
    function: Callable[[], object], device: torch.device, runs: int
) -> tuple[float, int | None]:
    """Median seconds, and the peak of allocated bytes on CUDA."""
    on_cuda = device.type == "cuda"
    for _ in range(2):
        function()
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        if on_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken), torch.cuda.max_memory_allocated() if on_cuda else None


if __name__ == "__main__":
    sys.exit(main())

"""Many requests at once: throughput, latency, and whether each answer is the one given alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

import sigmanens as sn
from benchmarks.runtime import exported
from benchmarks.subjects import Subject
from sigmanens.ensemble.inputs import call_arguments
from sigmanens.ensemble.prediction import Prediction, logits_of

__all__ = ["SERVED", "served", "under_load"]

SERVED = ("one network", "separate", "sigmanens", "separate onnx", "sigmanens onnx")
TOLERANCE = 1e-5
DIFFERENT = 16  # inputs, asked over and over

Predict = Callable[[Any], Tensor]


def served(name: str, subject: Subject, members: int, folder: Path) -> Predict:
    """What maps inputs to probabilities (B, C) from any number of threads: a name of ``SERVED``."""
    if name.endswith("onnx"):
        return exported(name, subject, members, folder).predict
    torch.manual_seed(0)
    if name == "sigmanens":
        ensemble = sn.convert(subject.make(), members).eval()
        return lambda x: ensemble.predict(x).probs
    networks = [subject.make().eval() for _ in range(members if name == "separate" else 1)]
    return partial(_averaged, networks)


def _averaged(networks: Sequence[nn.Module], x: Any) -> Tensor:
    args, kwargs = call_arguments(x)
    with torch.inference_mode():
        logits = [logits_of(network(*args, **kwargs)) for network in networks]
        return Prediction.from_logits(torch.stack(logits)).probs


def under_load(
    predict: dict[str, Predict], inputs: Sequence[Any], threads: int, requests: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Ask each contestant in turn, ``rounds`` times ``requests`` times.

    Args:
        predict: what answers, by name.
        inputs: of the requests, in turn.
        threads: requests at a time.
        requests: in a round.
        rounds: turns of every contestant.

    Returns:
        by name ``throughput`` in requests a second (median of the rounds), ``latency`` and
        ``latency_95`` in seconds (median and 95 % of all requests), ``answers`` and ``wrong``:
        how many differ from the answer given alone by more than 1e-5.
    """
    alone = {name: [answer(x) for x in inputs] for name, answer in predict.items()}
    taken: dict[str, list[float]] = {name: [] for name in predict}
    rates: dict[str, list[float]] = {name: [] for name in predict}
    wrong = dict.fromkeys(predict, 0)
    for _ in range(rounds):
        for name, answer in predict.items():

            def ask(i: int, name: str = name, answer: Predict = answer) -> tuple[float, bool]:
                begin = time.perf_counter()
                found = answer(inputs[i % len(inputs)])
                seconds = time.perf_counter() - begin
                gap = float((found - alone[name][i % len(inputs)]).abs().max())
                return seconds, not gap <= TOLERANCE

            with ThreadPoolExecutor(threads) as pool:
                begin = time.perf_counter()
                results = list(pool.map(ask, range(requests)))
                rates[name].append(requests / (time.perf_counter() - begin))
            taken[name] += [seconds for seconds, _ in results]
            wrong[name] += sum(differs for _, differs in results)
    return {
        name: {
            "throughput": median(rates[name]),
            "latency": median(taken[name]),
            "latency_95": quantiles(taken[name], n=20)[-1],
            "answers": len(taken[name]),
            "wrong": wrong[name],
        }
        for name in predict
    }

"""Serve a trained ensemble over HTTP: ONNX Runtime answers, abstains, and watches for drift.

    sigmanens train --data.source photos --out runs/pets
    sigmanens export runs/pets --out pets.onnx
    python examples/server.py runs/pets pets.onnx --risk 0.05
    curl --data-binary @cat.jpg http://127.0.0.1:8000/predict

POST /predict takes a picture file, or a text in UTF-8, as its body. It returns the class, its
probability, the uncertainty in nats, and ``abstain``: true where the run's validation examples do
not allow an answer at this risk. GET /health says whether recent inputs look like those examples.

Needs: pip install 'sigmanens[lab,onnx]' fastapi uvicorn
"""

from __future__ import annotations

import argparse
import io
import math
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image

import sigmanens as sn
from sigmanens.errors import DataError, InputError
from sigmanens.lab.predicting import TrainedRun

LARGEST = 20_000_000  # bytes of a request
OUTPUTS = ("probs", "entropy", "expected_entropy", "modulation")


class Drift:
    """Whether the mean entropy of the last inputs is that of the validation examples.

    With μ and σ of N validation entropies, z = (mean − μ) / (σ √(1/n + 1/N)) for n inputs. Inputs
    that are like the validation examples exceed |z| = 4 in one window of 16,000, in the normal
    limit.
    """

    def __init__(self, entropies: Sequence[float], window: int = 200) -> None:
        self.expected = math.fsum(entropies) / len(entropies)
        spread = math.fsum((e - self.expected) ** 2 for e in entropies) / (len(entropies) - 1)
        self.deviation, self.size = math.sqrt(spread), len(entropies)
        self._recent: deque[float] = deque(maxlen=window)
        self._lock = threading.Lock()

    def add(self, entropy: float) -> None:
        """Count one input."""
        with self._lock:
            self._recent.append(entropy)

    def report(self) -> dict[str, Any]:
        """Mean entropy of the window, what is expected, and the verdict once the window is full."""
        with self._lock:
            recent = list(self._recent)
        found: dict[str, Any] = {"inputs": len(recent), "expected_entropy": self.expected}
        if not recent:
            return found | {"entropy": None, "drifted": None}
        mean = math.fsum(recent) / len(recent)
        error = self.deviation * math.sqrt(1 / len(recent) + 1 / self.size)
        drifted = abs(mean - self.expected) > 4 * error
        full = len(recent) == self._recent.maxlen
        return found | {"entropy": mean, "drifted": drifted if full else None}


class Service:
    """A run's ONNX file with the run's classes, reading of inputs, abstention and drift check.

    ``answer`` may be called from many threads: sessions of ONNX Runtime are made for that, and
    nothing else is shared but the drift check, which has a lock.
    """

    def __init__(self, run: TrainedRun, model: Path, risk: float, window: int = 200) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # requests run side by side
        self.session = onnxruntime.InferenceSession(
            str(model), options, providers=["CPUExecutionProvider"]
        )
        self.run = run
        self.rule = run.abstention(risk)
        self.drift = Drift(run.validation()[0].entropy.tolist(), window)

    def answer(self, body: bytes) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            DataError: if the body is no picture, or no text.
        """
        given = self._given(body)
        try:
            x = self.run.read([given]).numpy()
        except OSError as e:  # a kind of picture that Pillow does not convert
            raise DataError(f"the picture cannot be read: {e}") from e
        name = self.session.get_inputs()[0].name
        probs, *rest = (v[0] for v in self.session.run(OUTPUTS, {name: x}))
        label = int(probs.argmax())
        uncertainty = dict(zip(OUTPUTS[1:], map(float, rest), strict=True))
        self.drift.add(uncertainty["entropy"])
        return {
            "class": self.run.classes[label],
            "probability": float(probs[label]),
            **uncertainty,
            "abstain": bool(self.rule.abstains(torch.tensor(probs[label]))),
        }

    def _given(self, body: bytes) -> Any:
        if self.run.inputs["kind"] == "texts":
            try:
                return body.decode()
            except UnicodeDecodeError as e:
                raise DataError(f"the body is no text in UTF-8: {e}") from e
        try:
            picture = Image.open(io.BytesIO(body))
            picture.load()
        except Exception as e:  # whatever a broken file makes the decoder raise
            raise DataError(f"the body is no picture: {e}") from e
        return picture


def application(service: Service) -> FastAPI:
    """The HTTP face of a service."""
    app = FastAPI(title="sigmanens")

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LARGEST:
                raise HTTPException(413, f"the body has more than {LARGEST:,} bytes")
        try:
            return await run_in_threadpool(service.answer, body)
        except (DataError, InputError) as e:
            raise HTTPException(422, str(e)) from e

    @app.get("/health")
    def health() -> dict[str, Any]:
        return service.drift.report() | {"abstention": str(service.rule)}

    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until stopped."""
    import uvicorn

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="folder of a finished `sigmanens train`")
    parser.add_argument("model", type=Path, help="file of `sigmanens export RUN --out FILE`")
    parser.add_argument("--risk", type=float, default=0.05, help="share of wrong answers allowed")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)
    service = Service(sn.load_run(args.run), args.model, args.risk)
    print(service.rule)
    uvicorn.run(application(service), port=args.port)


if __name__ == "__main__":
    main()

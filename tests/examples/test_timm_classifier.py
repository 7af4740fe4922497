"""examples/timm_classifier.py at a tiny size, on pictures made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import sigmanens as sn

CLASSES = ("dark", "light", "striped")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders with splits train and test: 16 × 16 pixels, told apart by their texture.

    Every fifth label is wrong, so that no temperature calls for certainty.
    """
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 16)):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                level = (label + (i % 5 == 0)) % 3
                pixels = draw.integers(0, 60, (16, 16, 3)) + 90 * min(level, 1)
                if level == 2:
                    pixels[::2] += 90
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / name / f"{i}.png")
    return folder


def arguments(pictures: Path, out: Path) -> list[str]:
    return [
        "--data", str(pictures), "--size", "16", "--members", "2", "--train", "60",
        "--calibration", "20", "--test", "28", "--epochs", "2", "--batch-size", "10",
        "--device", "cpu", "--out", str(out),
    ]  # fmt: skip


def test_it_runs_from_conversion_to_onnx(
    pictures: Path,
    tmp_path: Path,
    example: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    out = tmp_path / "out"
    found = example("timm_classifier").main(
        [*arguments(pictures, out), "--ood", str(pictures), "--ood-split", "train"]
    )
    assert list(found) == ["ensemble", "ensemble, tempered", "its first member", "ood"]
    rows = [found[name] for name in list(found)[:3]]
    for row in rows:
        assert 0 <= row["accuracy"] <= 1
        assert 0 < row["nll"] < 5
    raw, tempered, member = rows
    assert raw["temperature"] == member["temperature"] == 1
    assert tempered["temperature"] != 1
    assert tempered["accuracy"] == raw["accuracy"]
    assert raw["nll"] != member["nll"]
    # Pictures of the same kind cannot be told from the test pictures.
    assert set(found["ood"]) == {"entropy", "expected_entropy", "modulation"}
    assert all(0.2 < auroc < 0.8 for auroc in found["ood"].values())

    printed = capsys.readouterr().out
    assert "15 norms converted, 0 kept, 0 refused" in printed
    assert f"{tempered['nll']:8.3f}" in printed
    assert "member 0 is a plain ResNet" in printed
    assert float(printed.rpartition("differs by ")[2]) < 1e-4
    assert (out / "ensemble.onnx").is_file()
    torch.manual_seed(0)
    base = timm.create_model("test_resnet", num_classes=3)
    again = sn.load(out / "ensemble", base=base)
    assert float(again.temperature) == pytest.approx(tempered["temperature"])


def test_a_checkpoint_is_kept_at_the_start(
    pictures: Path, tmp_path: Path, example: Callable[[str], ModuleType]
) -> None:
    base = timm.create_model("test_resnet", num_classes=3)
    with torch.no_grad():
        for module in base.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean += 0.1  # so that it counts as trained
    torch.save(base.state_dict(), tmp_path / "base.pth")
    module = example("timm_classifier")
    converted = []

    def convert(*args: object, **kwargs: object) -> sn.SigmaEnsemble:
        converted.append(sn.convert(*args, **kwargs))  # type: ignore[arg-type]
        return converted[-1]

    class Stopped(Exception):
        pass

    def stop(*args: object) -> None:
        raise Stopped

    module.sn = type("sn", (), {**vars(sn), "convert": staticmethod(convert)})
    module.train = stop
    options = ["--checkpoint", str(tmp_path / "base.pth")]
    with pytest.raises(Stopped):
        module.main([*arguments(pictures, tmp_path / "out"), *options])
    (ensemble,) = converted
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = base.eval()(x)
        for logits in ensemble.eval()(x):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)

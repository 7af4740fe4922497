"""A timm classifier becomes an ensemble: convert, train, calibrate, predict, save, load, export.

    python examples/timm_classifier.py --data DIR_OR_HUB_NAME --out DIR

The data set is a folder of pictures in class folders, a folder of parquet files or a hub name, with
splits ``train`` and ``test`` (or as said). The network is any of timm's: untrained by default, with
timm's own weights under --pretrained (a download), or from a file under --checkpoint. With --ood,
pictures of another kind are told from the test pictures by how uncertain the prediction is.

The default size takes a minute on one core and is made for small pictures. docs/tutorials/timm.md
shows a run.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch

import sigmanens as sn
from sigmanens import evaluation
from sigmanens.lab.data import ImageSet, load_images


def load_data(args: argparse.Namespace) -> dict[str, ImageSet]:
    """Pictures to train on, to fit the temperature on, and to test on."""

    def part(source: str, split: str, limit: int) -> ImageSet:
        # The same draw for every seed of training.
        return load_images(
            source, split, size=args.size, limit=limit, mean=(0.5,) * 3, std=(0.25,) * 3,
            allow_missing_classes=True,
        )  # fmt: skip

    test = part(args.data, args.test_split, args.calibration + args.test)
    parts = {
        "train": part(args.data, args.train_split, args.train),
        "calibration": test.subset(slice(0, args.calibration)),
        "test": test.subset(slice(args.calibration, None)),
    }
    if args.ood is not None:
        parts["ood"] = part(args.ood, args.ood_split, args.test)
    return parts


def train(
    ensemble: sn.SigmaEnsemble,
    pictures: ImageSet,
    loss_fn: sn.EnsembleLoss,
    args: argparse.Namespace,
) -> None:
    """SGD with a cosine schedule, which keeps the ratio of the groups' rates."""
    x, y = pictures.normalized(), pictures.labels
    groups = sn.param_groups(ensemble, lr=args.lr, weight_decay=5e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    steps = args.epochs * math.ceil(len(y) / args.batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    sn.check_optimizer(ensemble, optimizer)
    for epoch in range(args.epochs):
        ensemble.train()
        for rows in torch.randperm(len(y)).split(args.batch_size):
            inputs, labels = x[rows].to(args.device), y[rows].to(args.device)
            optimizer.zero_grad()
            loss = loss_fn(ensemble(inputs), labels, ensemble)  # one label per picture
            loss.backward()
            optimizer.step()
            scheduler.step()
        cosine = sn.diversity.cosine(ensemble)
        print(f"epoch {epoch + 1}: task loss {float(loss_fn.task_loss):.3f}, cosine {cosine:.2f}")


def measure(
    ensemble: sn.SigmaEnsemble, data: dict[str, ImageSet], args: argparse.Namespace
) -> dict[str, Any]:
    """Fit the temperature, which the ensemble keeps, and measure the predictions."""

    def predict(part: str, **options: Any) -> sn.Prediction:
        x = data[part].normalized().to(args.device)
        return ensemble.predict(x, chunk=512, **options)

    held_out = predict("calibration", temperature=1.0)
    temperature = evaluation.fit_temperature(held_out.log_probs, data["calibration"].labels)
    ensemble.temperature.fill_(temperature)

    y = data["test"].labels
    found = {"ensemble": predict("test", temperature=1.0), "ensemble, tempered": predict("test")}
    found["its first member"] = predict("test", members=1, temperature=1.0)
    rows: dict[str, Any] = {
        name: {
            "accuracy": evaluation.accuracy(p.log_probs, y),
            "nll": evaluation.nll(p.log_probs, y),
            "ece": evaluation.ece(p.log_probs, y),
            "temperature": p.temperature,
        }
        for name, p in found.items()
    }
    print(f"\n{'':22}{'accuracy':>9}{'NLL':>8}{'ECE':>8}{'T':>7}")
    for name, row in rows.items():
        print(f"{name:22}" + "{accuracy:9.3f}{nll:8.3f}{ece:8.3f}{temperature:7.2f}".format(**row))
    pred = found["ensemble, tempered"]
    most = int(pred.modulation.argmax())
    names = data["test"].classes
    print(
        f"\nmembers disagree most about test picture {most}: total uncertainty "
        f"{float(pred.entropy[most]):.2f} = {float(pred.expected_entropy[most]):.2f} expected + "
        f"{float(pred.modulation[most]):.2f} modulation (nats); they say "
        + ", ".join(names[int(c)] for c in pred.member_probs[:, most].argmax(-1))
        + f", the label is {names[int(y[most])]}"
    )
    if "ood" in data:
        other = predict("ood")
        rows["ood"] = {
            score: evaluation.auroc(getattr(pred, score), getattr(other, score))
            for score in ("entropy", "expected_entropy", "modulation")
        }
        for score, auroc in rows["ood"].items():
            print(f"out of distribution by {score}: AUROC {auroc:.3f}")
    return rows


def deploy(
    ensemble: sn.SigmaEnsemble, base: torch.nn.Module, example: torch.Tensor, out: Path
) -> None:
    """Save, load on top of the base, and export; each gives the same probabilities."""
    expected = ensemble.predict(example).probs
    ensemble.save_pretrained(out / "ensemble")
    again = sn.load(out / "ensemble", base=base).to(example.device)
    assert torch.equal(again.predict(example).probs, expected)
    size = sum(f.stat().st_size for f in (out / "ensemble").iterdir())
    print(f"\nsaved and loaded: {out / 'ensemble'}, {size / 1e3:,.0f} kB, the same probabilities")
    member = ensemble.member(0)
    print(f"member 0 is a plain {type(member).__name__}")
    if any(importlib.util.find_spec(p) is None for p in ("onnx", "onnxruntime", "onnxscript")):
        print("no ONNX file: pip install sigmanens[onnx]")
        return
    import onnxruntime

    sn.export_onnx(ensemble.cpu(), out / "ensemble.onnx", example.cpu())
    session = onnxruntime.InferenceSession(out / "ensemble.onnx")
    one = {session.get_inputs()[0].name: example[:1].cpu().numpy()}  # any batch size
    names = [output.name for output in session.get_outputs()]
    results = dict(zip(names, session.run(None, one), strict=True))
    gap = float((torch.from_numpy(results["probs"]) - expected[:1].cpu()).abs().amax())
    print(f"exported: {out / 'ensemble.onnx'}, outputs {', '.join(names)}; differs by {gap:.0e}")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder or hub name of the data set")
    parser.add_argument("--train-split", default="train")
    parser.add_argument("--test-split", default="test")
    parser.add_argument("--ood", help="folder or hub name of pictures of another kind")
    parser.add_argument("--ood-split", default="test")
    parser.add_argument("--model", default="test_resnet.r160_in1k", help="of timm.list_models()")
    parser.add_argument("--pretrained", action="store_true", help="timm's weights, downloaded")
    parser.add_argument("--checkpoint", default="", help="… or from this file")
    parser.add_argument("--size", type=int, default=32, help="pictures are made so high and wide")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--train", type=int, default=2000, help="pictures to train on")
    parser.add_argument("--calibration", type=int, default=500, help="… to fit a temperature on")
    parser.add_argument("--test", type=int, default=1000, help="… to test on")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--tau", type=float, default=0.5)
    parser.add_argument("--weight", type=float, default=1e-3, help="of the diversity penalty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder to save in")
    args = parser.parse_args(argv)

    data = load_data(args)
    torch.manual_seed(args.seed)
    base = timm.create_model(
        args.model,
        pretrained=args.pretrained,
        checkpoint_path=args.checkpoint,
        num_classes=data["train"].num_classes,
    ).to(args.device)
    example = data["test"].subset(slice(0, 3)).normalized().to(args.device)
    ensemble = sn.convert(base, args.members, example=example)
    print(ensemble.report)
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=args.tau, weight=args.weight))
    train(ensemble, data["train"], loss_fn, args)
    rows = measure(ensemble, data, args)
    deploy(ensemble.eval(), base, example, args.out)
    return rows


if __name__ == "__main__":
    main()

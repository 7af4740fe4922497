"""Text files and picture folders with names for labels: train, evaluate, export."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("datasets")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

import datasets
import transformers
from PIL import Image

from sigmanens.lab.cli import main
from sigmanens.lab.data.texts import load_texts, load_tokenizer
from sigmanens.lab.pipeline import load_run
from sigmanens.lab.runs import read_metrics

WORDS = {"happy": ["good", "fine", "great"], "sad": ["bad", "poor", "awful"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("folders")
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = place / "cache"
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "film",
        *WORDS["happy"],
        *WORDS["sad"],
    ]
    (place / "bert").mkdir()
    (place / "bert" / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    tokenizer = transformers.BertTokenizerFast(vocab_file=str(place / "bert" / "vocab.txt"))
    tokenizer.save_pretrained(place / "bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(place / "bert")
    yield place
    datasets.config.HF_DATASETS_CACHE = before


def phrases(count: int) -> list[dict[str, str]]:
    moods = list(WORDS)
    return [
        {"text": f"film {WORDS[moods[i % 2]][i % 3]}", "mood": moods[i % 2]} for i in range(count)
    ]


def write_texts(folder: Path, kind: str) -> None:
    folder.mkdir()
    for split, count in (("train", 36), ("test", 24)):
        with (folder / f"{split}.{kind}").open("w", encoding="utf-8", newline="") as file:
            if kind == "csv":
                writer = csv.DictWriter(file, ["text", "mood"])
                writer.writeheader()
                writer.writerows(phrases(count))
            else:
                file.writelines(json.dumps(phrase) + "\n" for phrase in phrases(count))


def write_pictures(folder: Path) -> None:
    """Class folders of dark and bright pictures."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 16), ("test", 12)):
        for name, level in (("dark", 60), ("bright", 180)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                noise = torch.randint(-40, 40, (8, 8, 3), generator=generator)
                picture = Image.fromarray((noise + level).to(torch.uint8).numpy())
                picture.save(folder / split / name / f"{i}.png")


COMMON = [
    "--ensemble.members=2", "--recipe.epochs=1", "--recipe.batch_size=8", "--threads=1",
]  # fmt: skip


def trained(arguments: list[str], out: Path) -> dict[str, Any]:
    assert main(["train", "--out", str(out), *COMMON, *arguments]) == 0
    metrics = read_metrics(out)
    assert [row["members"] for row in metrics["rows"]] == [1, 2]  # never without a reference
    (pair,) = metrics["differences"]
    assert pair["metrics"]["nll"]["basis"] == "samples"
    return metrics


def exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both graphs answer as the ensemble does, for another number of examples too."""
    ensemble, shop = load_run(run)
    given = shop.material.data.test.images[:7]
    if shop.material.padding is not None:  # texts are filled up to the length of the graph
        missing = shop.config.data.length - given.shape[1]
        given = torch.nn.functional.pad(given, (0, missing), value=shop.material.padding)
    eager = ensemble.predict(given)
    program, onnx = run.parent / "ens.pt2", run.parent / "ens.onnx"
    assert main(["export", str(run), "--out", str(program), "--format=program"]) == 0
    answers = torch.export.load(program).module()(given)
    torch.testing.assert_close(answers["member_probs"], eager.member_probs, rtol=0, atol=1e-5)
    assert main(["export", str(run), "--out", str(onnx)]) == 0
    session = pytest.importorskip("onnxruntime").InferenceSession(str(onnx))
    (name,) = (node.name for node in session.get_inputs())
    (found,) = session.run(["member_probs"], {name: given.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), eager.member_probs, rtol=0, atol=1e-5)
    assert capsys.readouterr().err == ""


def evaluated(run: Path, found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint gives the row of the training."""
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["nll"] == pytest.approx(found["rows"][-1]["nll"], rel=1e-5)


def test_texts_with_words_for_labels(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path / "texts", "json")
    write_texts(tmp_path / "csv", "csv")
    bert = str(root / "bert")
    found = trained(
        [
            f"--data.source={tmp_path / 'texts'}", f"--data.tokenizer={bert}", "--data.length=8",
            f"--model.name=transformers/{bert}", "--recipe.optimizer=adamw", "--recipe.lr=0.01",
        ],
        tmp_path / "run",
    )  # fmt: skip
    assert found["rows"][-1]["classes"] == 2
    assert {row["head"] for row in found["rows"]} == {"fresh"}  # the reference's, too
    assert "one seed" in capsys.readouterr().out
    evaluated(tmp_path / "run", found, capsys)
    exported(tmp_path / "run", capsys)
    target = tmp_path / "member.safetensors"
    assert main(["export", str(tmp_path / "run"), "--out", str(target), "--format=member:1"]) == 0
    assert any("embeddings" in key for key in load_file(target))
    tokenizer = load_tokenizer(bert)
    one, other = (
        load_texts(tmp_path / kind, "train", tokenizer=tokenizer) for kind in ("texts", "csv")
    )
    assert torch.equal(one.tokens, other.tokens)
    assert (one.classes, other.texts) == (("happy", "sad"), one.texts)


def test_class_folders_of_pictures(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "pictures")
    arguments = [
        f"--data.source={tmp_path / 'pictures'}", "--model.name=resnet8",
        '--model.options={"width": 4}', "--recipe.lr=0.05",
    ]  # fmt: skip
    found = trained(arguments, tmp_path / "run")
    evaluated(tmp_path / "run", found, capsys)
    exported(tmp_path / "run", capsys)
    target = tmp_path / "one.safetensors"
    assert main(["export", str(tmp_path / "run"), "--out", str(target), "--format=collapse"]) == 0
    assert load_file(target)


def test_what_cannot_be_read_is_named_in_one_line(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture, a file of other weights, weights of the hub: status 1, and no folder stays."""
    write_pictures(tmp_path / "pictures")
    arguments = [f"--data.source={tmp_path / 'pictures'}", "--out", str(tmp_path / "run"), *COMMON]
    weights = tmp_path / "other.safetensors"
    save_file({"fc.weight": torch.zeros(2, 2)}, weights)

    def said(*more: str) -> str:
        assert main(["train", *arguments, *more]) == 1
        out, err = capsys.readouterr()
        reason = [line for line in err.splitlines() if not line.startswith("recipe: finetune")]
        assert (out, len(reason)) == ("", 1)
        assert not (tmp_path / "run").exists()
        return err

    misfit = said("--model.name=resnet8", f"--model.weights={weights}")
    assert "other.safetensors do not fit" in misfit
    absent = said("--model.name=timm/resnet18", '--model.options={"pretrained": true}')
    assert "the weights of timm/resnet18 cannot be loaded" in absent
    shutil.copytree(tmp_path / "pictures", tmp_path / "broken")
    broken = tmp_path / "broken" / "train" / "dark" / "3.png"
    broken.write_bytes(broken.read_bytes()[:40])
    assert "3.png" in said("--model.name=resnet8", f"--data.source={tmp_path / 'broken'}")

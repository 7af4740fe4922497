"""New pictures and texts through a finished run: from Python, and on the command line."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("jsonargparse")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

from PIL import Image
from tests.lab import test_from_folders as folders

import sigmanens as sn
from sigmanens.errors import DataError, InputError, MissingPackageError, RunError
from sigmanens.lab.cli import main
from sigmanens.lab.data.texts import encode, load_tokenizer
from sigmanens.lab.predicting import Answers, TrainedRun

ROOT = Path(__file__).resolve().parents[2]

root = folders.root  # a tiny BERT
HEAD = ["input", "class", "probability", "entropy", "expected_entropy", "modulation"]


@pytest.fixture(scope="module")
def place(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on pictures and on texts; of their data the test pictures alone are left."""
    place = tmp_path_factory.mktemp("predicting")
    folders.write_pictures(place / "pictures")
    folders.write_texts(place / "texts", "csv")
    for name, options in {
        "pictures": [
            "--model.name=resnet8", '--model.options={"width": 4}', "--recipe.lr=0.05",
            "--recipe.epochs=3", "--data.mean=[0.4,0.5,0.6]", "--data.std=[0.2,0.3,0.4]",
        ],
        "texts": [
            f"--data.tokenizer={root / 'bert'}", "--data.length=8", "--recipe.optimizer=adamw",
            f"--model.name=transformers/{root / 'bert'}", "--recipe.lr=0.01",
        ],
    }.items():  # fmt: skip
        out = place / "runs" / name
        given = [f"--data.source={place / name}", "--controls=[]", "--out", str(out)]
        assert main(["train", *folders.COMMON, *given, *options]) == 0
    (place / "pictures" / "test").rename(place / "new")
    shutil.rmtree(place / "pictures")
    shutil.rmtree(place / "texts")
    return place


@pytest.fixture
def run(place: Path) -> TrainedRun:
    return sn.load_run(place / "runs" / "pictures")


@pytest.fixture
def reader(place: Path) -> TrainedRun:
    return sn.load_run(place / "runs" / "texts")


def predict(arguments: list[str | Path], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What the command prints, on standard output and error."""
    capsys.readouterr()
    assert main(["predict", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    return out, err


def refused(arguments: list[str | Path], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a failure; nothing went to standard output."""
    capsys.readouterr()
    assert main(["predict", *map(str, arguments)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_a_run_says_how_inputs_are_read(run: TrainedRun, reader: TrainedRun, root: Path) -> None:
    assert run.inputs == {
        "version": 1, "predictions": "sigmanens_m2_tau1", "classes": ["bright", "dark"],
        "kind": "pictures", "size": [8, 8], "channels": 3, "crop": None,
        "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4],
    }  # fmt: skip
    assert reader.inputs == {
        "version": 1, "predictions": "sigmanens_lambda0_m2", "classes": ["happy", "sad"],
        "kind": "texts", "column": "text", "tokenizer": str(root / "bert"), "length": 8,
    }  # fmt: skip


def test_pictures_by_hand(run: TrainedRun, place: Path) -> None:
    files = [place / "new" / name for name in ("dark/3.png", "bright/0.png", "dark/7.png")]
    pixels = np.stack([np.array(Image.open(file)) for file in files]).transpose(0, 3, 1, 2)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    expected = run.ensemble.predict((torch.from_numpy(pixels) / 255 - mean) / std)
    found = run.predict(files, batch=2)
    torch.testing.assert_close(found.prediction.probs, expected.probs)
    torch.testing.assert_close(found.prediction.modulation, expected.modulation)
    for i, row in enumerate(found.rows()):
        assert list(row) == HEAD
        assert row["input"] == str(files[i])
        assert row["class"] == ("bright", "dark")[int(expected.probs[i].argmax())]
        assert row["probability"] == pytest.approx(expected.probs[i].max().item(), rel=1e-5)
        assert row["expected_entropy"] == pytest.approx(
            expected.expected_entropy[i].item(), rel=1e-4
        )
        both = row["expected_entropy"] + row["modulation"]
        assert row["entropy"] == pytest.approx(both, rel=1e-6)
    assert [row["class"] for row in found.rows()] == ["dark", "bright", "dark"]


def test_pictures_from_anywhere(run: TrainedRun, place: Path, tmp_path: Path) -> None:
    """A file, a folder, Pillow's, of other sizes and modes; hidden and other files are left out."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    dark = Image.open(place / "new" / "dark" / "3.png")
    dark.resize((16, 16), Image.Resampling.NEAREST).save(tmp_path / "deep" / "er" / "a.PNG")
    shutil.copy(place / "new" / "bright" / "0.png", tmp_path / "b.png")
    (tmp_path / ".c.png").write_bytes(b"")
    (tmp_path / "d.csv").write_text("text\nx\n")
    found = run.predict(tmp_path)
    assert found.names == (str(tmp_path / "b.png"), str(tmp_path / "deep" / "er" / "a.PNG"))
    others = run.predict([str(tmp_path / "b.png"), dark, dark.convert("CMYK"), dark.convert("P")])
    assert others.names[1:] == ("picture 1", "picture 2", "picture 3")
    torch.testing.assert_close(others.prediction.probs[:2], found.prediction.probs)
    assert others.prediction.labels.tolist() == [0, 1, 1, 1]
    assert len(run.predict(dark)) == 1


def test_texts_from_anywhere(
    reader: TrainedRun, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    texts = ["film good", "film awful, poor", 'film "fine"']
    tokens = encode(texts, load_tokenizer(str(root / "bert")), 8)
    expected = reader.ensemble.predict(tokens)
    found = reader.predict(texts)
    torch.testing.assert_close(found.prediction.probs, expected.probs)
    assert found.names == tuple(texts)
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("id", "text"), *enumerate(texts)])
    lines = [json.dumps({"text": text, "id": None}) for text in texts]
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "c.json").write_text(f"[{','.join(lines)}]")
    (tmp_path / "d.txt").write_text("\n".join(texts))
    rows = found.rows()
    for file in sorted(tmp_path.iterdir()):
        assert reader.predict(file).rows() == reader.predict(str(file)).rows() == rows
    assert reader.predict([tmp_path / "a.csv", texts[0]]).names == (*texts, texts[0])
    assert reader.predict(texts[0]).names == (texts[0],)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\r\n".join([*texts, "", ""])))
    where = reader.folder
    out, err = predict([where, tmp_path / "d.txt", "-", "--format=jsonl"], capsys)
    assert [json.loads(line) for line in out.splitlines()] == [*rows, *rows]
    assert err == ""


def test_the_command_writes_a_table(
    run: TrainedRun, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    expected = run.predict(place / "new").rows()
    out, err = predict([run.folder, place / "new"], capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert (list(rows[0]), len(rows), err) == (HEAD, 24, "")
    assert [{k: str(v) for k, v in row.items()} for row in expected] == rows
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(row["input"] for row in rows)))
    target = tmp_path / "new" / "found.csv"
    said, _ = predict([run.folder, "-", "--out", target], capsys)
    assert said == f"{target}: 24 predictions\n"
    assert target.read_text(encoding="utf-8") == out
    assert "exists already" in refused([run.folder, place / "new", "--out", target], capsys)


def test_the_least_certain_come_first_and_on_a_page(
    run: TrainedRun, reader: TrainedRun, place: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    page = tmp_path / "look.html"
    everything = run.predict(place / "new").rows()
    order = sorted(everything, key=lambda row: -row["entropy"])[:5]
    out, err = predict(
        [run.folder, place / "new", "--least-certain=5", "--format=jsonl", "--page", page], capsys
    )
    assert [json.loads(line) for line in out.splitlines()] == order
    assert err == f"Page: {page}\n"
    text = page.read_text(encoding="utf-8")
    assert text.count('src="data:image/jpeg;base64,') == 5
    assert not re.search(r"https?://", text)
    assert len(text) < 100_000  # no plots, so no plotly
    shown = re.findall(r'<th scope="row" class="given" data-v="([^"]*)"', text)
    assert shown == [row["input"] for row in order]
    assert len(run.predict(place / "new").least_certain(100)) == 24
    found = reader.predict(["film <b>good</b>", "film bad"])
    texts = found.write_page(tmp_path / "texts.html").read_text(encoding="utf-8")
    assert "film &lt;b&gt;good&lt;/b&gt;" in texts
    assert "<img" not in texts


def test_abstention_promises_a_risk(
    run: TrainedRun, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 validation pictures, all right: 0.5^12 is below δ/4, and 0.9^12 is far above."""
    rule = run.abstention(0.5)
    assert (rule.n, rule.errors, rule.delta) == (12, 0, 0.05)
    found = run.predict(place / "new", abstain_at_risk=0.5)
    assert found.abstention == rule
    confidence = found.prediction.confidence.tolist()
    assert [row["abstain"] for row in found.rows()] == [c < rule.threshold for c in confidence]
    out, err = predict([run.folder, place / "new", "--abstain-at-risk", "0.5"], capsys)
    assert out == found.text()
    assert {row["abstain"] for row in csv.DictReader(io.StringIO(out))} <= {"true", "false"}
    assert err.startswith("sigmanens predict: answered where the probability is at least 0.")
    with pytest.warns(sn.SigmaNensWarning, match="lowest risk that they can promise is 0"):
        none = run.predict(place / "new", abstain_at_risk=0.1)
    assert all(row["abstain"] for row in none.rows())
    out, err = predict([run.folder, place / "new", "--abstain-at-risk", "0.1"], capsys)
    assert (out, err) == (none.text(), f"sigmanens predict: {none.abstention}\n")


def test_what_cannot_be_predicted_is_named_in_one_line(
    run: TrainedRun, reader: TrainedRun, place: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    broken, empty, target = tmp_path / "broken.png", tmp_path / "empty", tmp_path / "out.csv"
    broken.write_bytes((place / "new" / "dark" / "3.png").read_bytes()[:40])
    empty.mkdir()
    given = [run.folder, place / "new", broken, "--out", target]
    assert f"picture 24 ({broken}) cannot be decoded" in refused(given, capsys)
    assert not target.exists()
    assert "no picture lies below" in refused([run.folder, empty], capsys)
    assert "no file or folder gone.png" in refused([run.folder, "gone.png"], capsys)
    assert "holds no run" in refused([empty, broken], capsys)
    line = refused([reader.folder, "film good"], capsys)
    assert "there is no file film good; texts themselves are read from standard input" in line
    for name, content, said in (
        ("a.csv", "words,mood\nfilm,happy\n", "has no column 'text', .* it has words, mood"),
        ("b.csv", "text\nfilm good, fine\n", "row 0 has more fields than the head"),
        ("c.csv", "", "has no row with named columns"),
        ("d.jsonl", '{"text": "film"}\n{"text": 3}\n', "row 1 has no text in column 'text'"),
        ("e.jsonl", "{text}\n", "cannot be read as jsonl in UTF-8"),
        ("f.xlsx", "text", "is no file of texts; expected a file that ends in .csv"),
        ("g.txt", "caf\xe9", "cannot be read as txt in UTF-8"),
    ):
        (tmp_path / name).write_bytes(content.encode("latin-1"))
        with pytest.raises(DataError, match=said):
            reader.predict(tmp_path / name)
    with pytest.raises(InputError, match="an input is a int; expected a text or a path"):
        reader.predict([3])
    with pytest.raises(InputError, match="an input is a float; expected a path or a Pillow"):
        run.predict([3.0])
    with pytest.raises(DataError, match="no input was given"):
        run.predict([])


def test_wrong_usage(run: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--abstain-at-risk=2", "--least-certain=0", "--format=xml"):
        with pytest.raises(SystemExit) as stopped:
            main(["predict", str(run.folder), "x.png", option])
        assert stopped.value.code == 2
    with pytest.raises(InputError, match="expected one of csv, jsonl"):
        Answers((), (), None, ()).text("xml")  # type: ignore[arg-type]


def test_runs_that_cannot_answer(run: TrainedRun, tmp_path: Path, place: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.folder, copy)
    (copy / "predictions.safetensors").unlink()
    again = sn.load_run(copy)
    assert again.predict(place / "new").rows() == run.predict(place / "new").rows()
    with pytest.raises(RunError, match="the run's predictions, cannot be read"):
        again.abstention(0.1)
    (copy / "inputs.json").unlink()
    with pytest.raises(RunError, match=r"has no inputs.json: .* Train again"):
        sn.load_run(copy)


def test_pictures_that_are_not_square(run: TrainedRun) -> None:
    """Without a size, such a run takes pictures of one shape only."""
    wide = TrainedRun(run.folder, run.ensemble, {**run.inputs, "size": [8, 12]})
    picture = Image.new("RGB", (12, 8), "white")
    assert len(wide.predict([picture, picture])) == 2
    with pytest.raises(DataError, match="picture 1 has 12 × 8 pixels; this run was trained on 8"):
        wide.predict([picture, picture.resize((8, 12))])


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sigmanens.lab.predicting", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'sigmanens\[lab\]'"):
        sn.load_run("runs/x")


# -- examples/server.py ----------------------------------------------------------------------------


@pytest.fixture
def server(place: Path) -> Callable[[str], Any]:
    """Makes the service of a run, with its ONNX file."""
    for package in ("fastapi", "httpx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("server", ROOT / "examples" / "server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(name: str, **options: Any) -> Any:
        folder, model = place / "runs" / name, place / f"{name}.onnx"
        if not model.exists():
            assert main(["export", str(folder), "--out", str(model)]) == 0
        service = module.Service(sn.load_run(folder), model, 0.4, **options)
        return service, module.application(service)

    return make


def test_a_server_answers_many_threads_as_the_run_answers_alone(
    server: Callable[[str], Any], place: Path, run: TrainedRun
) -> None:
    from fastapi.testclient import TestClient

    service, app = server("pictures")
    files = sorted((place / "new").rglob("*.png"))
    bodies = [file.read_bytes() for file in files]
    expected = run.predict(files, abstain_at_risk=0.4).rows()

    def ask(start: int) -> list[tuple[int, dict[str, Any]]]:
        order = [(start * 7 + 3 * i) % len(files) for i in range(60)]
        with TestClient(app) as client:
            return [(i, client.post("/predict", content=bodies[i]).json()) for i in order]

    with ThreadPoolExecutor(8) as pool:
        answers = [one for found in pool.map(ask, range(8)) for one in found]
    assert len(answers) == 480
    for i, answer in answers:
        row = expected[i]
        assert answer["class"] == row["class"]
        for key in ("probability", "entropy", "expected_entropy", "modulation"):
            assert answer[key] == pytest.approx(row[key], abs=1e-4)
        if abs(row["probability"] - service.rule.threshold) > 1e-4:  # which is one of these
            assert answer["abstain"] == row["abstain"]
    assert service.drift.report()["inputs"] == 200


def test_a_server_reads_texts_of_any_length(
    server: Callable[[str], Any], reader: TrainedRun
) -> None:
    from fastapi.testclient import TestClient

    client, texts = (
        TestClient(server("texts")[1]),
        ["good", "poor awful film film bad", "fine film"],
    )
    rows = reader.predict(texts).rows()

    def ask(i: int) -> dict[str, Any]:
        return client.post("/predict", content=texts[i % 3].encode()).json()

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(30)))
    for i, answer in enumerate(answers):
        assert answer["class"] == rows[i % 3]["class"]
        assert answer["probability"] == pytest.approx(rows[i % 3]["probability"], abs=1e-4)
    assert client.post("/predict", content=b"\xff").status_code == 422


def test_a_server_refuses_what_is_no_picture_and_sees_drift(
    server: Callable[[str], Any], place: Path
) -> None:
    from fastapi.testclient import TestClient

    service, app = server("pictures", window=5)
    client = TestClient(app)
    assert client.post("/predict", content=b"x" * 20_000_001).status_code == 413
    refused = client.post("/predict", content=b"no picture")
    assert (refused.status_code, refused.json()["detail"][:23]) == (422, "the body is no picture:")
    assert client.get("/health").json()["drifted"] is None  # nothing to judge by
    body = next((place / "new").rglob("*.png")).read_bytes()
    for _ in range(5):
        client.post("/predict", content=body)
    health = client.get("/health").json()
    assert health["inputs"] == 5
    assert health["abstention"] == str(service.rule)
    gap = abs(health["entropy"] - health["expected_entropy"])
    entropies = service.run.validation()[0].entropy.double()
    error = entropies.std() * (1 / 5 + 1 / len(entropies)) ** 0.5
    assert health["drifted"] == bool(gap > 4 * error)
    for _ in range(5):
        service.drift.add(float(entropies.mean() + 10 * error))
    assert client.get("/health").json()["drifted"] is True

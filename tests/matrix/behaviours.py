"""What an ensemble has to do with every network, one function each.

A behaviour returns if it holds. What it raises becomes the cell: an error of sigmanens is a
refusal, UpstreamError a limit of the base network, anything else a fault.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.matrix.entries import Entry
from tests.matrix.subject import (
    BATCH,
    MEMBERS,
    SINGLE,
    FunctionalNorms,
    Subject,
    UpstreamError,
    answer,
    apart,
    call,
    cast,
    close,
    counted_norms,
    gap,
    leaves,
    spread,
    tensors_of,
)
from torch import Tensor, nn

import sigmanens as sn

Behaviour = Callable[[Subject], None]


def upstream(what: str, attempt: Callable[[], Any]) -> Any:
    """What ``attempt`` gives; if it fails, the base is at fault."""
    try:
        return attempt()
    except Exception as e:
        raise UpstreamError(f"{what}: {first_line(e)}") from e


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


# -- behaviours -----------------------------------------------------------------------------------


def convert(subject: Subject) -> None:
    """Every norm counted in the base is converted, copied with a head or kept as noted."""
    ensemble = subject.convert()
    fate = {n.name: n for n in ensemble.report.norms}
    counted = counted_norms(subject.base)
    overlooked = sorted(set(counted) - set(fate))
    assert not overlooked, f"{len(overlooked)} norms are not in the report, as '{overlooked[0]}'"
    for name in counted:
        entry = fate[name]
        if entry.action == "kept" and entry.kind in subject.entry.kept and entry.reason:
            subject.note(f"{entry.kind} is kept: {entry.reason}")
            continue
        inside = entry.action == "kept" and entry.reason.startswith("inside a head")
        assert entry.action == "converted" or inside, f"'{name}' is {entry.action}: {entry.reason}"
    expected = {id(counted[n]) for n in counted if fate[n].action == "converted"}
    assert len(ensemble.sigma_norms()) == len(expected)


def step0(subject: Subject) -> None:
    """Each member answers in evaluation as the base does, with and without gradients."""
    base, example, tolerance = subject.exact
    expected = answer(base, example)
    ensemble = subject.convert(base).eval()
    for got in (answer(ensemble, example), leaves(call(ensemble, example))):
        for m in range(MEMBERS):
            close([y[m].detach() for y in got], expected, tolerance, f"member {m}")


def train(subject: Subject) -> None:
    """Each member answers in training as the base does, and its statistics move as the base's."""
    source, example, tolerance = subject.exact
    base, twin = (copy.deepcopy(source).train() for _ in range(2))
    expected = upstream("its training pass fails", lambda: answer(base, example))
    if gap(answer(twin, example), expected) > tolerance:
        raise UpstreamError("its training pass is random")
    ensemble = subject.convert(source).train()
    got = answer(ensemble, example)
    for m in range(MEMBERS):
        close([y[m] for y in got], expected, tolerance, f"member {m}")
        buffers = dict(ensemble.member(m).named_buffers())
        for name, theirs in base.named_buffers():
            ours = buffers[name]
            if theirs.is_floating_point():
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=name)
            else:
                assert torch.equal(ours, theirs), name


def backward(subject: Subject) -> None:
    """A backward pass reaches every member's scales of every norm that the base's reaches."""
    base = copy.deepcopy(subject.base).train()
    outputs = upstream("its training pass fails", lambda: leaves(call(base, subject.example)))
    directions = [torch.randn(y.shape, generator=torch.Generator().manual_seed(3)) for y in outputs]

    def loss(results: Iterable[Tensor]) -> Tensor:
        return torch.stack([(y * d).sum() for y, d in zip(results, directions, strict=True)]).sum()

    upstream("its backward pass fails", lambda: loss(outputs).backward())
    ensemble = subject.convert().train()
    loss(y.sum(0) for y in leaves(call(ensemble, subject.example))).backward()
    modules = dict(base.named_modules())
    for name, layer in ensemble.sigma_norms().items():
        weight = getattr(modules[name], "weight", None)
        reached = not isinstance(weight, nn.Parameter) or not weight.requires_grad
        reached = reached or (weight.grad is not None and bool(weight.grad.any()))
        if not reached:
            continue  # an output in this mode does not depend on it
        grad = layer.logit.grad
        assert grad is not None, f"the scales of '{name}' have no gradient"
        assert grad.isfinite().all(), f"the gradient of '{name}' is not finite"
        reached_members = grad.flatten(1).any(1)
        assert reached_members.all(), f"members without a gradient at '{name}': {reached_members}"


def sgd(subject: Subject) -> None:
    """Three steps of SGD on one loss make members differ that were equal in function."""
    base, example, _ = subject.exact
    upstream("its training pass fails", lambda: answer(copy.deepcopy(base).train(), example))
    ensemble = subject.convert(base)
    loss_fn = sn.EnsembleLoss(class_dim=subject.entry.class_dim)
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, lr=1e-2), momentum=0.9)

    def differences() -> list[float]:
        logits = answer(ensemble.eval(), example)[0]
        assert logits.isfinite().all(), "not finite"
        moved = [float((logits[m] - logits[0]).abs().amax()) for m in range(1, MEMBERS)]
        return [d / spread(logits[0]) for d in moved]

    rounding = max(differences())
    ensemble.train()
    for _ in range(3):
        optimizer.zero_grad()
        logits = leaves(call(ensemble, example))[0]
        loss_fn(logits, subject.labels(logits[0]), ensemble).backward()
        optimizer.step()
    for m, moved in enumerate(differences(), start=1):
        assert moved > max(100 * rounding, 1e-6), (
            f"members 0 and {m} differ by {moved:.1e} of the spread over inputs"
        )


def save_load(subject: Subject) -> None:
    """What was saved and put back on the base answers bit for bit alike."""
    ensemble = apart(subject.convert()).eval()
    expected = answer(ensemble, subject.example)
    with tempfile.TemporaryDirectory() as folder:
        ensemble.save_pretrained(folder, shared="never")
        loaded = sn.load(folder, base=subject.base).eval()
    got = answer(loaded, subject.example)
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def member(subject: Subject) -> None:
    """A member as a plain network: the base's class and keys, nothing of ours, its answers."""
    base, example, tolerance = subject.exact
    ensemble = apart(subject.convert(base)).eval()
    together = answer(ensemble, example)
    assert gap([y[0] for y in together], [y[1] for y in together]) > SINGLE, "members are alike"
    for m in range(MEMBERS):
        plain = ensemble.member(m)
        ours = [n for n, x in plain.named_modules() if type(x).__module__.startswith("sigmanens")]
        assert not ours, f"'{ours[0]}' is a class of ours"
        kinds = {n: type(x) for n, x in base.named_modules()}
        assert {n: type(x) for n, x in plain.named_modules()} == kinds, (
            "other classes than the base"
        )
        assert plain.state_dict().keys() == base.state_dict().keys()
        close(answer(plain, example), [y[m] for y in together], tolerance, f"member {m}")


def one_member(subject: Subject) -> None:
    """An ensemble of one is the base, and does not disagree with itself."""
    base, example, tolerance = subject.exact
    ensemble = subject.convert(base, members=1).eval()
    close([y[0] for y in answer(ensemble, example)], answer(base, example), tolerance, "member 0")
    prediction = ensemble.predict(example, class_dim=subject.entry.class_dim)
    assert float(prediction.modulation.abs().amax()) < 1e-9


def autocast(subject: Subject) -> None:
    """Under bf16 autocast members err as the base does, and train with finite gradients."""
    expected = answer(copy.deepcopy(subject.base), subject.example)

    def half(network: nn.Module) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return answer(network, subject.example)

    theirs = upstream("fails under autocast", lambda: half(copy.deepcopy(subject.base)))
    allowed = 3 * gap(theirs, expected) + 0.05
    ensemble = subject.convert().eval()
    got = half(ensemble)
    for m in range(MEMBERS):
        close([y[m] for y in got], expected, allowed, f"member {m}")
    assert all(n.logit.dtype == torch.float32 for n in ensemble.sigma_norms().values())
    with torch.autocast("cpu", torch.bfloat16):
        logits = leaves(call(ensemble, subject.example))[0].float()
    dim = subject.entry.class_dim
    F.softmax(logits, dim if dim < 0 else dim + 1).square().sum().backward()
    for name, layer in ensemble.sigma_norms().items():
        grad = layer.logit.grad
        assert grad is None or grad.isfinite().all(), f"the gradient of '{name}' is not finite"


def untouched(subject: Subject) -> None:
    """After all that the base is bit for bit what it was, and in the same mode."""
    now = tensors_of(subject.base)
    assert now.keys() == subject.before.keys()
    changed = [k for k, v in now.items() if not torch.equal(v, subject.before[k])]
    assert not changed, f"{len(changed)} tensors changed, as '{changed[0]}'"
    assert not any(m.training for m in subject.base.modules())
    assert not any(type(m).__module__.startswith("sigmanens") for m in subject.base.modules())


def compiled(subject: Subject, backend: str = "aot_eager") -> None:
    """torch.compile(fullgraph=True) captures the ensemble in both modes, where it does the base."""
    plain, example, tolerance = subject.exact
    for training in (False, True):
        torch._dynamo.reset()
        base = copy.deepcopy(plain).train(training)
        whole = torch.compile(base, fullgraph=True, backend=backend)
        mode = "training" if training else "evaluation"
        upstream(f"does not compile in {mode}", lambda w=whole: call(w, example))
        torch._dynamo.reset()
        ensemble = subject.convert(plain).train(training)
        expected = leaves(call(copy.deepcopy(ensemble), example))
        call(ensemble.eval(), example)  # the check of the first batch stays out of a graph
        ensemble.train(training)
        got = leaves(call(torch.compile(ensemble, fullgraph=True, backend=backend), example))
        for m in range(MEMBERS):
            close([y[m] for y in got], [y[m] for y in expected], tolerance, f"member {m}, {mode}")


def export(subject: Subject) -> None:
    """torch.export gives the ensemble's predictions for other batch sizes too."""
    from sigmanens import export_program

    base, example, tolerance = subject.exact
    ensemble = apart(subject.convert(base)).eval()
    try:
        program = export_program(ensemble, example, class_dim=subject.entry.class_dim)
    except sn.SigmaNensError as e:
        raise _whose(e) from e
    larger = cast(subject.entry.example(BATCH + 3), next(base.parameters()).dtype)
    got = call(program.module(), larger)
    expected = ensemble.predict(larger, class_dim=subject.entry.class_dim)
    for name in PREDICTED:
        torch.testing.assert_close(
            got[name], getattr(expected, name), rtol=tolerance, atol=tolerance / 10
        )


def onnx(subject: Subject) -> None:
    """ONNX Runtime gives the ensemble's predictions at two batch sizes, to 1e-4 or rounding."""
    from sigmanens import export_onnx

    ensemble = apart(subject.convert()).eval()
    write = partial(export_onnx, ensemble, class_dim=subject.entry.class_dim)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ens.onnx"
        try:
            write(path, subject.example)
        except sn.SigmaNensError as e:
            if "differs from the ensemble by" not in str(e):
                raise _whose(e) from e
            # Runtimes compute in float32, and so may differ by as much as float32 is wrong.
            rounding = _rounding(ensemble, subject)
            write(path, subject.example, verify=False)
            error = max(_runtime_error(path, ensemble, subject, n) for n in (1, BATCH + 1))
            if error > 3 * rounding:
                raise
            subject.note(
                f"probabilities in float32 are wrong by {rounding:.0e} in the random state, those "
                f"of ONNX Runtime differ from them by {error:.0e}"
            )


PREDICTED = ("probs", "member_probs", "entropy", "expected_entropy", "modulation")


def _rounding(ensemble: sn.SigmaEnsemble, subject: Subject) -> float:
    """Largest error of the ensemble's predictions in float32, judged by float64."""
    found = ensemble.predict(subject.example, class_dim=subject.entry.class_dim)
    example = cast(subject.example, torch.float64)
    exact = copy.deepcopy(ensemble).double().predict(example, class_dim=subject.entry.class_dim)
    return max(float((getattr(exact, n) - getattr(found, n)).abs().amax()) for n in PREDICTED)


def _runtime_error(path: Path, ensemble: sn.SigmaEnsemble, subject: Subject, rows: int) -> float:
    """Largest difference of ONNX Runtime's predictions from the ensemble's."""
    import onnxruntime

    example = subject.entry.example(rows)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = [node.name for node in session.get_inputs()]
    values = example if isinstance(example, Mapping) else {inputs[0]: example}
    results = session.run(list(PREDICTED), {name: values[name].numpy() for name in inputs})
    expected = ensemble.predict(example, class_dim=subject.entry.class_dim)
    return max(
        float((torch.from_numpy(got) - getattr(expected, name)).abs().amax())
        for name, got in zip(PREDICTED, results, strict=True)
    )


def _whose(error: Exception) -> Exception:
    """The base's limit if the export of a plain member fails too, as the message then says."""
    if "member 0 too" in str(error):
        return UpstreamError(first_line(error).partition(". It fails for")[0])
    return error


CHEAP: dict[str, Behaviour] = {
    "convert": convert,
    "step 0, eval": step0,
    "step 0, train": train,
    "backward": backward,
    "3 SGD steps": sgd,
    "save, load": save_load,
    "member(i)": member,
    "M = 1": one_member,
    "bf16": autocast,
    "base untouched": untouched,
}
COSTLY: dict[str, Behaviour] = {"compile": compiled, "export": export, "ONNX": onnx}


# -- cells ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """What became of one network.

    Attributes:
        network: ``"library/name"``.
        cells: by behaviour: "pass", "refused: …", "upstream: …" or "FAIL: …".
        norms: counted in the base.
        parameters: of the base.
        notes: what sigmanens warned of, norms that are kept, and norms that are no modules.
        refusal: the whole message, if conversion was refused.
        seconds: taken.
    """

    network: str
    cells: dict[str, str] = field(default_factory=dict)
    norms: int = 0
    parameters: int = 0
    notes: list[str] = field(default_factory=list)
    refusal: str = ""
    seconds: float = 0.0

    def faults(self) -> dict[str, str]:
        """The cells that are faults."""
        return {k: v for k, v in self.cells.items() if v.startswith("FAIL")}


def cell(behaviour: Behaviour, subject: Subject) -> tuple[str, str]:
    """Content of one cell, and the whole message if it is a refusal."""
    try:
        with subject.quiet():
            behaviour(subject)
    except sn.SigmaNensError as e:
        return f"refused: {type(e).__name__}: {first_line(e)}", f"{type(e).__name__}: {e}"
    except UpstreamError as e:
        return f"upstream: {e}", ""
    except Exception as e:
        kind = "" if isinstance(e, AssertionError) else f"{type(e).__name__}: "
        return f"FAIL: {kind}{first_line(e)}", ""
    return "pass", ""


def run(entry: Entry, behaviours: dict[str, Behaviour]) -> Row:
    """All cells of one network; a refused conversion fills the row."""
    start = time.perf_counter()
    row = Row(entry.id)
    try:
        subject = Subject(entry)
    except Exception as e:
        row.cells = dict.fromkeys(behaviours, f"FAIL: cannot be set up: {first_line(e)}")
        return row
    row.norms = len(counted_norms(subject.base))
    row.parameters = sum(p.numel() for p in subject.base.parameters())
    for name, behaviour in behaviours.items():
        row.cells[name], message = cell(behaviour, subject)
        if behaviour is convert and message:
            row.refusal = message
            row.cells = dict.fromkeys(behaviours, row.cells[name])
            break
    row.notes = list(subject.notes)
    with subject.quiet(), FunctionalNorms(subject.base) as functional:
        answer(subject.base, subject.example)
    if functional.calls:
        row.notes.append(f"{functional.calls} norms are functions, not modules: not converted")
    row.seconds = time.perf_counter() - start
    gc.collect()
    return row

"""The report page of a compressed checkpoint: one HTML file without script and without any address outside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from neuronmm.compression import report as compression_report
from neuronmm.compression.report import REPORT, loss_kind, summary, warnings
from neuronmm.emulator.timing.measured import CAVEAT
from neuronmm.measure import page_charts as charts
from neuronmm.measure.config import PredictionConfig
from neuronmm.measure.inspection import Inspection, inspect
from neuronmm.measure.page_commands import repeating
from neuronmm.measure.page_inputs import EvaluationDocument, read_benchmark, read_evaluation, read_sweep
from neuronmm.measure.prediction import PredictionResult, run_prediction
from neuronmm.measure.statistics import with_error
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, LINEARS
from neuronmm.models.source import expanded, short_name

NEW_TOKENS = 64
"""Tokens of the predicted answer to a prompt of 128 tokens."""

_DEVICES = ("trn1", "trn2", "trn3")


@dataclass(frozen=True)
class PageConfig:
    """What a page shows: the compressed checkpoint ``out`` and, where given, the dense model and measurements."""

    out: str
    baseline: str | None = None
    evaluations: Sequence[Path] = ()
    benchmark: Path | None = None
    sweep: Path | None = None

    @property
    def inputs(self) -> list[str | Path | None]:
        """Everything that the page is made from."""
        return [self.out, self.baseline, *self.evaluations, self.benchmark, self.sweep]


def render(config: PageConfig, command: str) -> str:
    """Return the HTML of the page. ``command`` is the command line that made it.

    Raises:
        UserError: ``out`` is not a compressed checkpoint, or an input is not what it has to be.
    """
    folder = expanded(config.out)
    if not folder.is_dir():
        raise UserError(f"{config.out}: no such folder; give the folder of a compressed checkpoint")
    model = inspect(folder)
    if model.spec is None:
        raise UserError(f"{config.out}: is not compressed; give a folder that compress wrote")
    report = compression_report.read(folder) if (folder / REPORT).exists() else None
    baseline = None if config.baseline is None else inspect(config.baseline)
    evaluations = [read_evaluation(file) for file in config.evaluations]
    benchmark = None if config.benchmark is None else read_benchmark(config.benchmark)
    refused = model.spec.few_bits
    predictions = [] if refused else [run_prediction(PredictionConfig(folder, device=device)) for device in _DEVICES]
    layers = model.config.num_hidden_layers
    matrices = {} if report is None else _matrices(report, layers)
    losses = {place: float(matrix["relative_error"]) for place, matrix in matrices.items()}
    spectra = {place: _spectrum(matrix) for place, matrix in matrices.items() if matrix["spectrum"]}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html.jinja").render(
        name=short_name(folder),
        facts=_facts(model, report),
        warnings=[] if report is None else warnings(report),
        sizes=_sizes(model, baseline),
        ratios=Markup(charts.ratio_map(_removed(model), layers)),
        losses=Markup(charts.loss_lines(losses, "relative loss")) if losses else None,
        spectra=Markup(charts.spectra_panels(spectra, layers)) if spectra else None,
        loss_of="" if report is None else loss_kind(report),
        matrices=[] if report is None else report["matrices"],
        report_name=REPORT,
        samples=[] if report is None else (report.get("fidelity") or {}).get("samples", []),
        evaluations=[_evaluation(document, folder) for document in evaluations],
        benchmark=benchmark,
        benchmark_of=[] if benchmark is None else _of_others(folder, [benchmark.model]),
        benchmark_charts=[] if benchmark is None else list(map(Markup, charts.benchmark_bars(benchmark))),
        sweep=config.sweep,
        sweep_charts=[] if config.sweep is None else list(map(Markup, charts.sweep_panels(*read_sweep(config.sweep)))),
        timeline=Markup(charts.prediction_timeline(predictions, NEW_TOKENS)) if predictions else None,
        refused=refused,
        timeline_rows=[_prediction(prediction) for prediction in predictions],
        new_tokens=NEW_TOKENS,
        caveat=CAVEAT,
        commands=[*repeating(config.out, report, evaluations, benchmark), command],
    )


def _facts(model: Inspection, report: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the facts of the model as (name, value)."""
    config, spec = model.config, model.spec
    assert spec is not None
    architecture = (
        f"{config.model_type}, {config.num_hidden_layers} layers, hidden size {config.hidden_size}, MLP "
        f"{config.intermediate_size}, {config.num_attention_heads} heads of {config.head} ({config.kv_heads} KV), "
        f"vocabulary {config.vocab_size:,}"
    )
    rows = [("architecture", architecture)]
    if report is not None:
        return [*rows, *summary(report)]
    if spec.weights != "model":
        rows.append(("dense weights", f"{spec.weights}, embedding and head int8"))
    return [
        *rows,
        ("method, targets", f"{spec.method}, {spec.targets}"),
        ("ratio asked, realised", f"{spec.asked_ratio:.2%}, {spec.realised_ratio:.2%} of the targeted weights"),
    ]


def _sizes(model: Inspection, baseline: Inspection | None) -> list[tuple[str, str, str]]:
    """Return (what, of the dense model, of the compressed one); the first is empty if it is not known."""

    def count(inspection: Inspection | None, kind: str) -> str:
        if inspection is None:
            return ""
        number = inspection.parameters[kind]
        return f"{number:,}" if number or kind != "head" else "tied to the embedding"

    rows = [(f"{kind}, parameters", count(baseline, kind), count(model, kind)) for kind in model.parameters]
    dense = model.dense_parameters if baseline is None else sum(baseline.parameters.values())
    rows.append(("all parameters", f"{dense:,}", f"{sum(model.parameters.values()):,}"))
    return [*rows, ("stored as", "" if baseline is None else _stored(baseline), _stored(model))]


def _stored(inspection: Inspection) -> str:
    return ", ".join(f"{size / 1e6:,.1f} MB {dtype}" for dtype, size in inspection.bytes.items())


def _removed(model: Inspection) -> dict[tuple[int, str], float]:
    """Return the fraction removed from every factorised linear; linears that share an A have that of all of them."""
    kept: dict[tuple[int, str], int] = {}
    dense: dict[tuple[int, str], int] = {}
    for linear in model.linears:
        group = linear.layer, linear.shares_a_of or linear.linear
        kept[group] = kept.get(group, 0) + linear.parameters
        dense[group] = dense.get(group, 0) + linear.dense_parameters
    groups = {(row.layer, row.linear): (row.layer, row.shares_a_of or row.linear) for row in model.linears}
    return {place: 1 - kept[group] / dense[group] for place, group in groups.items()}


def _matrices(report: dict[str, Any], layers: int) -> dict[tuple[int, str], dict[str, Any]]:
    """Return what the report records of every factorised linear; those that share an A have one entry.

    A loss of a million would be false, and no other could be seen beside it.
    """
    places = {f"{LAYERS}.{n}.{path}": (n, short) for n in range(layers) for short, path in LINEARS.items()}
    return {
        places[name]: matrix
        for matrix in report["matrices"]
        if matrix["rank"] is not None and 0 <= matrix["relative_error"] < 1e6
        for name in (matrix["name"], *matrix["sharing"])
        if name in places
    }


def _spectrum(matrix: dict[str, Any]) -> charts.Spectrum:
    return matrix["spectrum"], matrix["rank"] / min(matrix["shape"]), matrix["relative_error"]


def _of_others(folder: Path, models: list[str]) -> list[str]:
    """Return the warning that measured ``models``, as the user named them somewhere, may be others than ``folder``."""
    name, names = short_name(folder), {PurePath(model).name for model in models}
    if names & {name, "", ".."}:  # of "." nobody knows which folder it was
        return []
    return [f"None of these models is called {name}: the figures may be of other checkpoints"]


def _evaluation(document: EvaluationDocument, folder: Path) -> dict[str, Any]:
    """Return the heading, the columns, the rows and the notes of one evaluation."""
    names = list(document.models)
    paired = len(names) > 1
    rows = []
    for measure in document.results:
        cells = [with_error(measure.models[name].model_dump()) for name in names]
        difference = measure.difference and with_error(measure.difference.model_dump(), sign="+")
        rows.append([measure.measure, *cells, *([difference or ""] if paired else [])])
    models = [f"{name}: {document.models[name].path}, {document.models[name].dtype}" for name in names]
    text = [f"text: {document.text['file']}"] if document.text and "file" in document.text else []
    columns = ["measure", *names, *(["paired difference"] if paired else [])]
    others = _of_others(folder, [model.path for model in document.models.values()])
    return {"columns": columns, "rows": rows, "notes": [*others, *models, *text, *document.notes]}


def _prediction(result: PredictionResult) -> list[str]:
    dense, compressed = result.dense.times, result.compressed.times
    times = [f"{value * 1e3:.2f}" for value in (dense.ttft, compressed.ttft, dense.tpot, compressed.tpot)]
    missing = [name for name in ("dense", "compressed") if not getattr(result, name).fits]
    fits = f"no: {' and '.join(missing)}" if missing else "yes"
    return [result.config.device, *times, f"{dense.tpot / compressed.tpot:.2f}x", fits]

"""The sweep: points, the meaning of their names, fronts, interruption, and the files written."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from neuronmm.cli import main
from neuronmm.compression.config import BARE, CompressionConfig
from neuronmm.measure import pareto, sweep_points
from neuronmm.measure import sweep as sweeping
from neuronmm.measure.config import EvaluationConfig
from neuronmm.measure.evaluate import EvaluationResult, evaluate, run_evaluation
from neuronmm.measure.pareto import draw_sweep, front, mark_fronts
from neuronmm.measure.sweep import SweepResult
from neuronmm.measure.sweep import sweep as run_sweep
from neuronmm.measure.sweep_config import SweepConfig, parse_method
from neuronmm.measure.sweep_points import SweepPoint, add_point
from neuronmm.measure.sweep_table import as_markdown
from neuronmm.models import UserError
from neuronmm.models.progress import Progress, no_progress
from tiny_models import make_tiny
from word_tokenizer import word_tokenizer

BASE = CompressionConfig(targets="mlp", align=2, calibration_rows=4, calibration_length=12, **BARE)
POINTS: dict[str, Any] = {"ratios": [0.2, 0.4], "methods": ["svd", "whitened"]}
ONE_POINT: dict[str, Any] = {"ratios": [0.4], "methods": ["svd"]}


def sweep(
    model: Path, out: Path, *, resume: bool = False, progress: Progress = no_progress, **settings: Any
) -> SweepResult:
    config = SweepConfig(**{"base": BASE, "context": 30, **settings})
    return run_sweep(model, out, config, resume=resume, progress=progress)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "model"
    torch.manual_seed(0)
    make_tiny().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(model: Path) -> list[Path]:
    files = []
    for seed in (1, 2):
        ids = torch.randint(3, 64, (150,), generator=torch.Generator().manual_seed(seed))
        files.append(model.parent / f"text{seed}.txt")
        files[-1].write_text(" ".join(f"w{i}" for i in ids.tolist()))
    return files


@pytest.fixture(scope="module")
def tasks(model: Path) -> list[Path]:
    files = [model.parent / "easy.jsonl", model.parent / "hard.jsonl"]
    for number, file in enumerate(files):
        rows = [(f"w{i} w4", ["w5 w6", f"w{7 + i}"], (i + number) % 2) for i in range(3, 11)]
        lines = [json.dumps({"query": query, "choices": choices, "gold": gold}) for query, choices, gold in rows]
        file.write_text("\n".join(lines))
    return files


@pytest.fixture(scope="module")
def finished(model: Path, texts: list[Path], tasks: list[Path]) -> tuple[Path, SweepResult]:
    """Return the folder and the result of a sweep with tasks and speeds."""
    out = model.parent / "finished"
    return out, sweep(model, out, **POINTS, texts=texts, tasks=tasks, questions=7, speed=True)


def states(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modification time and the content of each file."""
    return {
        str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_every_point_is_a_measured_checkpoint(
    finished: tuple[Path, SweepResult], model: Path, texts: list[Path], tasks: list[Path]
) -> None:
    out, result = finished
    names = [(point["name"], point["ratio"]) for point in result.points]
    assert names == [("dense", 0), ("svd", 0.2), ("whitened", 0.2), ("svd", 0.4), ("whitened", 0.4)]
    folders = [model] + [out / f"{name}-{ratio}" for name, ratio in names[1:]]
    for point, folder in zip(result.points, folders, strict=True):
        again = evaluate(folder, text=texts[1], context=30)["results"][0]["models"]["model"]
        assert point["perplexity"]["text2"] == pytest.approx(again)
        exams = evaluate(folder, tasks=tasks, limit=7)["results"]
        normed = [entry["models"]["model"]["value"] for entry in exams if entry["measure"].endswith("acc_norm")]
        assert point["accuracy"]["value"] == pytest.approx(sum(normed) / 2)
        assert list(point["accuracy"]["tasks"]) == ["easy", "hard"]
        assert point["bits"] == 32
        assert point["speed"]["slowest"] <= point["speed"]["tokens_per_second"] <= point["speed"]["fastest"]
    assert result.points[0]["speed"]["speed_up"] == 1
    config = json.loads((out / "svd-0.4" / "config.json").read_text())["quantization_config"]
    assert (config["method"], config["asked_ratio"], config["align"]) == ("svd", 0.4, 2)
    sizes = [point["bytes"] for point in result.points]
    assert sizes[0] == 4 * sum(p.numel() for p in make_tiny().parameters())
    assert sizes[1] == sizes[2] and sizes[0] > sizes[1] > sizes[3]
    assert json.loads((out / "sweep.json").read_text()) == json.loads(json.dumps(result.to_json()))
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_has_one_row_per_point_and_marks_the_front(finished: tuple[Path, SweepResult]) -> None:
    out, result = finished
    text = (out / "sweep.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 5 and all(row.count("|") == rows[0].count("|") for row in rows)
    assert "perplexity, text1" in rows[0] and "accuracy" in rows[0] and "x dense" in rows[0]
    for point, row in zip(result.points, rows[1:], strict=True):
        cell = row.split("|")[6]
        assert ("*" in cell) == ("bytes, text1" in point["fronts"]) and f"{point['bytes'] / 1e6:.1f}" in row
    assert any("bytes, text1" in point["fronts"] for point in result.points[1:])


def test_an_interrupted_sweep_is_resumed_and_a_finished_one_extended(
    finished: tuple[Path, SweepResult], model: Path, texts: list[Path], tmp_path: Path, monkeypatch: Any
) -> None:
    out, calls = tmp_path / "out", []

    def stop(stage: str, fraction: float) -> None:
        calls.append(stage)
        if calls.count("compressing") == 8:  # in the second point, after one of its layers
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(model, out, **POINTS, texts=texts, progress=stop)
    before = states(out)
    assert {name.split("/")[0] for name in before} == {
        "run.json", "dense.point.json", "svd-0.2", "svd-0.2.point.json", "calibration", "whitened-0.2.partial",
    }  # fmt: skip
    with pytest.raises(UserError, match="--resume"):
        sweep(model, out, **POINTS, texts=texts)
    fractions: dict[str, float] = {}
    reports: list[tuple[str, float]] = []

    def count(stage: str, fraction: float) -> None:
        fractions[stage] = fractions.get(stage, 0) + fraction
        reports.append((stage, fraction))

    result = sweep(model, out, **POINTS, texts=texts, resume=True, progress=count)
    after = states(out)
    assert all(after[name] == state for name, state in before.items() if ".partial" not in name)
    assert "sampling text" in calls and "sampling text" not in fractions  # all points use one text
    assert fractions["compressing"] == pytest.approx(1) and fractions["measuring"] == pytest.approx(1)
    compared = max(number for number, (stage, _) in enumerate(reports) if stage == "comparing")
    assert reports[compared + 1] == ("measuring", 0.0), "a slow measurement is not shown as the stage before it"
    for mine, other in zip(result.points, finished[1].points, strict=True):
        assert (mine["bytes"], mine["perplexity"]) == (other["bytes"], other["perplexity"])

    monkeypatch.setattr(sweeping, "create_point", lambda *a: pytest.fail("compressed again"))
    again = sweep(model, out, **ONE_POINT, texts=texts, resume=True)
    assert again.points == result.points  # also those that this sweep did not ask for
    assert all(states(out)[name] == state for name, state in after.items() if not name.startswith("sweep."))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratios": [0.99]}, "ratio = 0.99"),
        ({"ratios": []}, "one or more ratios"),
        ({"methods": ["magic"]}, "'magic' is not one of"),
        ({"methods": ["svd+whitened"]}, "both a method"),
        ({"methods": [""]}, "'' is not one of"),
        ({"texts": []}, "texts"),
        ({"texts": ["a/x.txt", "b/x.txt"]}, "rename one of the files"),
        ({"texts": ["nowhere.txt"]}, "no such file"),
        ({"tasks": ["nowhere.jsonl"]}, "no such"),
        ({"limit": 0}, "--limit is 0"),
        ({"questions": 0}, "--questions is 0"),
        ({"questions": 3}, "--questions is for --tasks"),
        ({"context": 129}, "model's maximum of 128"),
        ({"model": "./nowhere"}, "no such file or folder"),
    ],
    ids=str,
)
def test_a_bad_request_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, model: Path, texts: list[Path], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"model": model, "ratios": [0.2], "methods": ["svd"], "texts": texts, **changes}
    with pytest.raises(UserError, match=message):
        sweep(out=tmp_path / "out", **asked)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_sweep_gets_further_measures(
    finished: tuple[Path, SweepResult], model: Path, texts: list[Path], tasks: list[Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    sweep(model, out, ratios=[0.2, 0.4], methods=["svd"], texts=texts[:1])
    facts: SweepPoint = {"name": "peer", "ratio": 0.4, "targets": "mlp", "realised_ratio": 0.4, "model_ratio": 0.3}
    add_point(out, "peer", finished[0] / "svd-0.4", {**facts, "seconds": 1.0, "peak_rss_bytes": 1})
    monkeypatch.setattr(sweeping, "create_point", lambda *a: pytest.fail("compressed again"))
    measured: list[str] = []

    def count(config: EvaluationConfig) -> EvaluationResult:
        measured.append("tasks" if config.text is None else Path(config.text).stem)
        return run_evaluation(config)

    monkeypatch.setattr(sweep_points, "run_evaluation", count)
    added = {**ONE_POINT, "texts": texts, "tasks": tasks, "questions": 7, "speed": True, "resume": True}
    fractions: list[float] = []
    result = sweep(model, out, **added, progress=lambda stage, fraction: fractions.append(fraction))
    assert sorted(measured) == ["tasks"] * 3 + ["text2"] * 3 and sum(fractions) == pytest.approx(1)
    points = [point for point in result.points if point["name"] != "peer"]
    expected = [point for point in finished[1].points if point["name"] != "whitened"]
    for point, other in zip(points, expected, strict=True):
        assert (point["perplexity"], point["accuracy"]) == (other["perplexity"], other["accuracy"])
        assert point["speed"]["tokens_per_second"] > 0
    assert json.loads((out / "run.json").read_text())["speed"] is True
    (peer,) = [point for point in result.points if point["name"] == "peer"]
    assert "speed" not in peer and list(peer["perplexity"]) == ["text1"]
    assert not any("text2" in place or "speed" in place for place in peer["fronts"])
    rows = [line for line in (out / "sweep.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 5 and len({row.count("|") for row in rows}) == 1
    for fewer in ({"texts": texts[:1]}, {"tasks": tasks[:1]}, {"speed": False}):
        with pytest.raises(UserError, match=f"another {next(iter(fewer))}"):
            sweep(model, out, **{**added, **fewer})


def test_a_folder_of_other_settings_is_refused(
    finished: tuple[Path, SweepResult], model: Path, texts: list[Path], tasks: list[Path], tmp_path: Path
) -> None:
    before = states(finished[0])
    same = {**POINTS, "texts": texts, "tasks": tasks, "questions": 7, "speed": True, "resume": True}
    for changes, message in (({"context": 31}, "another context"), ({"speed": False}, "another speed")):
        with pytest.raises(UserError, match=message):
            sweep(model, finished[0], **{**same, **changes})
    with pytest.raises(UserError, match="not the folder of a sweep"):
        sweep(model, tmp_path, **POINTS, texts=texts, resume=True)
    assert states(finished[0]) == before


def test_a_methods_words_are_values_of_settings() -> None:
    assert parse_method("whitened") == {"method": "whitened"}
    assert parse_method("svd+all") == {"method": "svd", "targets": "all"}
    wanted = {"method": "anchored", "allocation": "global", "share_a": "auto", "refine": "fast"}
    assert parse_method("anchored+global+share+fast") == wanted
    assert parse_method("svd+int8") == {"method": "svd", "factor_dtype": "int8", "weight_dtype": "int8"}
    assert parse_method("svd+int4") == {"method": "svd", "factor_dtype": "int4", "weight_dtype": "int4"}
    assert parse_method("pivoted+int4") == {"form": "pivoted", "factor_dtype": "int8", "weight_dtype": "int4"}
    assert parse_method("int4") == {"ratio": 0.0, "weight_dtype": "int4"}
    assert parse_method("whitened+pivoted") == {"method": "whitened", "form": "pivoted"}
    assert parse_method("whitened+two") == {"method": "whitened", "form": "two"}
    for text in (
        "whitened+off",
        "whitened+damping",
        "whitened+fast+full",
        "whitened+fast+fast",
        "whitened+",
        "svd+int4+int8",
    ):
        with pytest.raises(UserError, match="--methods"):
            parse_method(text)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_the_front_holds_exactly_the_points_that_no_other_beats(points: list[tuple[int, int]]) -> None:
    best = front(points)
    assert best
    for index, (x, y) in enumerate(points):
        better = [p for p in points if p[0] <= x and p[1] <= y and p != (x, y)]
        assert (index in best) == (not better)


def test_a_point_of_fewer_bits_that_beats_all_others_is_the_front(
    finished: tuple[Path, SweepResult], tmp_path: Path
) -> None:
    """A user asks for the best model of a size, in whatever precision."""
    result = copy.deepcopy(finished[1])
    small = copy.deepcopy(result.points[1])
    small.update(name="int8", bits=8, ratio=0.0, bytes=1)
    del small["targets"]
    for text in result.settings.texts:
        small["perplexity"][text]["value"] = 1.0
    small["speed"]["tokens_per_second"] = 1e9
    result.points.append(small)
    mark_fronts(result.points, result.costs, list(result.settings.texts))
    assert len(small["fronts"]) == 4 and not any(point["fronts"] for point in result.points[:-1])
    rows = [line for line in as_markdown(result).splitlines() if line.startswith("| ")]
    assert rows[-1].startswith("| int8 | 8 |  |  |") and rows[-2].startswith("| whitened | 32 | 0.4 |")
    draw_sweep(result.points, result.costs, ["text1"], "model", tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


def test_low_rank_and_few_bits_in_one_sweep(model: Path, texts: list[Path], tmp_path: Path) -> None:
    methods = ["int4", "svd+int4", "svd", "int8"]
    result = sweep(model, tmp_path / "out", ratios=[0.2, 0.4], methods=methods, texts=texts[:1])
    names = [(point["name"], point["ratio"], point["bits"]) for point in result.points]
    assert names == [
        ("dense", 0, 32), ("int4", 0, 4), ("int8", 0, 8),
        ("svd", 0.2, 32), ("svd+int4", 0.2, 4), ("svd", 0.4, 32), ("svd+int4", 0.4, 4),
    ]  # fmt: skip
    sizes = {point["name"]: point["bytes"] for point in result.points if point["ratio"] in (0, 0.2)}
    assert sizes["int4"] < sizes["int8"] < sizes["dense"] and sizes["svd+int4"] < sizes["svd"]
    block = json.loads((tmp_path / "out" / "svd+int4-0.2" / "config.json").read_text())["quantization_config"]
    assert (block["weights"], block["factors"], block["format"]) == ("int4", "int4", 3)
    assert "targets" not in result.points[1] and result.points[4]["targets"] == "mlp"
    kept = states(tmp_path / "out")
    sweep(model, tmp_path / "out", ratios=[0.4], methods=["int4"], texts=texts[:1], resume=True)
    assert {name: kept[name] for name in kept if "point" in name or "int4" in name}.items() <= states(
        tmp_path / "out"
    ).items()


def test_a_point_created_elsewhere_is_measured_and_shown(
    finished: tuple[Path, SweepResult], model: Path, texts: list[Path], tasks: list[Path], tmp_path: Path
) -> None:
    theirs = finished[0] / "svd-0.4"
    facts: SweepPoint = {"name": "peer", "ratio": 0.4, "targets": "all", "bytes": 1234}
    facts |= {"realised_ratio": 0.4, "model_ratio": 0.3, "seconds": 1.0, "peak_rss_bytes": 1}
    settings = {"ratios": [0.2], "methods": ["svd"], "texts": texts, "tasks": tasks, "questions": 7}
    sweep(model, tmp_path / "out", **settings)
    add_point(tmp_path / "out", "peer", theirs, facts)
    add_point(tmp_path / "out", "rounded", model, {"name": "only rounded", "ratio": 0.0})
    result = sweep(model, tmp_path / "out", resume=True, **settings)
    assert any(line.endswith("|  |  |") for line in as_markdown(result).splitlines() if "only rounded" in line)
    point = result.points[-1]
    assert (point["name"], point["bytes"], point["targets"]) == ("peer", 1234, "all")
    same = finished[1].points[3]
    assert (point["perplexity"], point["accuracy"]) == (same["perplexity"], same["accuracy"])
    assert "## targets: all" in as_markdown(result)


def test_the_legend_of_long_names_stays_inside_the_picture(
    finished: tuple[Path, SweepResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = copy.deepcopy(finished[1])
    for start in ("whitened", "anchored", "asvd"):
        point = copy.deepcopy(result.points[1])
        point["name"] = f"{start}+share+global+full+factors+int8"
        result.points.append(point)
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **b: (save(figure, *a, **b), drawn.append(figure)))
    draw_sweep(result.points, ["bytes"], ["text1", "text2"], "model", tmp_path / "sweep.png")
    drawn[0].draw_without_rendering()
    legend, figure = drawn[0].legends[0].get_window_extent(), drawn[0].bbox
    assert figure.x0 <= legend.x0 and legend.x1 <= figure.x1


def test_targets_without_a_method_are_their_own_label(finished: tuple[Path, SweepResult]) -> None:
    result = copy.deepcopy(finished[1])
    result.points[1].update(name="mlp")
    result.points = [point for point in result.points if point["name"] in ("dense", "mlp")]
    axes = Figure().subplots()
    pareto.panel(axes, result.points, "text1", "bytes")
    assert [handle.get_label() for handle in axes.containers] == ["dense", "mlp"]


def test_targets_share_a_methods_colour_and_differ_in_the_marker(finished: tuple[Path, SweepResult]) -> None:
    result = copy.deepcopy(finished[1])
    other = copy.deepcopy(result.points[1])
    other.update(name="svd+all", targets="all")
    result.points.append(other)
    axes = Figure().subplots()
    pareto.panel(axes, result.points, "text1", "bytes")
    drawn = {handle.get_label(): handle.lines[0] for handle in axes.containers}
    assert list(drawn) == ["dense", "svd, mlp", "whitened, mlp", "svd, all"]
    colours = {label: line.get_color() for label, line in drawn.items()}
    assert colours["svd, mlp"] == colours["svd, all"] != colours["whitened, mlp"]
    assert drawn["svd, mlp"].get_marker() == drawn["whitened, mlp"].get_marker() != drawn["svd, all"].get_marker()


def test_the_command(
    model: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("align: 2\ncalibration_rows: 4\ncalibration_length: 12\n")
    command = ["sweep", str(model), "-o", str(tmp_path / "out"), "--recipe", str(recipe), "--text", str(texts[0])]
    command += ["--ratios", "0.3", "--methods", "svd, whitened", "--context", "30", "--limit", "2"]

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sweeping, "create_point", interrupt)
        assert main(command) == 130
    assert "--resume" in capsys.readouterr().err
    assert main(command) == 2
    capsys.readouterr()
    assert main([*command, "--resume"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert [point["name"] for point in json.loads(last)["points"]] == ["dense", "svd", "whitened"]
    assert json.loads(last)["limit"] == 2 and any("whitened" in line for line in table)
    assert main([*command, "--resume", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1

"""The report page: complete, valid HTML without script or address, whatever the checkpoint says."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import html5lib
import pytest
from transformers import PreTrainedTokenizerBase

from compression_runs import config
from neuronmm.cli import main
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.pipeline import compress
from neuronmm.compression.report import REPORT
from neuronmm.measure import page, page_charts
from neuronmm.measure.config import PredictionConfig
from neuronmm.measure.inspection import inspect
from neuronmm.measure.page import PageConfig, render
from neuronmm.measure.page_commands import repeating
from neuronmm.measure.page_inputs import read_benchmark, read_evaluation, read_sweep
from neuronmm.measure.prediction import run_prediction
from neuronmm.models import UserError
from tiny_models import make_tiny

HOSTILE = "<script>alert('$x_{1}$')</script> \"onload='x' {{ 7 * 7 }} </style>\u202e &amp; ]]> https://evil.example/"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder with a dense model, its compressed checkpoint, and measurements of both."""
    folder = tmp_path_factory.mktemp("page")
    make_tiny().save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    compress(folder / "dense", folder / "out", config(ratio=0.3, targets="all", share_a="auto", allocation="global"))
    (folder / "text.txt").write_text(" ".join(f"w{3 + n % 60}" for n in range(300)))
    estimate = {"value": 17.25, "standard_error": 0.5}
    point: dict[str, Any] = {"ratio": 0.0, "bytes": 269030016, "bits": 16, "dtype": "bfloat16"}
    point |= {"perplexity": {"text": estimate}, "speed": {"tokens_per_second": 200.0}}
    point |= {"fronts": ["bytes, text", "speed, text"]}
    low = point | {"name": "whitened", "ratio": 0.2, "targets": "mlp", "bytes": 237159040, "fronts": ["bytes, text"]}
    (folder / "sweep").mkdir()
    sweep = {"what": "sweep", "texts": {"text": "text.txt"}, "costs": ["bytes", "speed"]}
    sweep["points"] = [point | {"name": "dense"}, low]
    (folder / "sweep" / "sweep.json").write_text(json.dumps(sweep))
    return folder


@pytest.fixture(scope="module")
def measured(made: Path) -> Path:
    """The folder ``made``, with what evaluate and benchmark print."""
    pair = [str(made / "out"), "--baseline", str(made / "dense"), "--json"]
    _print_to(made / "quality.json", ["evaluate", *pair, "--text", str(made / "text.txt"), "--dtype", "fp32"])
    _print_to(made / "speed.json", ["benchmark", *pair, "--runs", "1", "--prompt-lengths", "4", "--new-tokens", "2"])
    return made


def _print_to(file: Path, words: list[str]) -> None:
    with file.open("w") as out, redirect_stdout(out):
        assert main(words) == 0


def everything(folder: Path) -> PageConfig:
    return PageConfig(
        str(folder / "out"), str(folder / "dense"), [folder / "quality.json"], folder / "speed.json", folder / "sweep"
    )


def elements(html: str) -> Iterator[Any]:
    """Yield every element of a page, which has to be valid HTML."""
    tree = html5lib.HTMLParser(tree=html5lib.getTreeBuilder("etree"), strict=True).parse(html)
    yield from (element for element in tree.iter() if isinstance(element.tag, str))


def text_of(html: str) -> str:
    return "\n".join("".join(element.itertext()) for element in elements(html))


def check_closed(html: str) -> None:
    """Check that a page is valid, runs nothing and names no address, and that its ids are unique."""
    ids = []
    for element in elements(html):
        tag = element.tag.rpartition("}")[2]
        assert tag not in ("script", "img", "iframe", "object", "embed", "base", "form", "a", "image", "foreignObject")
        ids += [value for name, value in element.attrib.items() if name == "id"]
        for name, value in element.attrib.items():
            name = str(name).rpartition("}")[2]
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "src", "xlink:href"):
                assert value == "data:," or value.startswith("#"), (tag, name, value)
            assert not re.search(r"url\((?!#)", value), (tag, name, value)
        if tag == "style":
            assert "url(" not in element.text and "@import" not in element.text
    assert len(ids) == len(set(ids)) > 0
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', html))
    assert used <= set(ids)


def test_a_page_with_everything(measured: Path) -> None:
    html = render(everything(measured), "neuronmm report out")
    check_closed(html)
    assert "://" not in html
    charts = {element.get("aria-label") for element in elements(html) if element.get("role") == "img"}
    assert len(charts) == 3 + 2 + 2 + 1
    text = text_of(html)
    for needed in (
        "Ratio per layer",
        "Loss and spectrum per matrix",
        "perplexity",
        "paired difference",
        "Pareto front",
        "trn3",
    ):
        assert needed in text
    for command in ("neuronmm compress ", "neuronmm evaluate ", "neuronmm benchmark ", "neuronmm report out"):
        assert command in text
    assert re.search(r"neuronmm evaluate \S+out --baseline \S+dense --text \S+text.txt --dtype fp32 --backend c", text)
    assert "--prompt-lengths 4 --batch 1 --new-tokens 2 --threads " in text
    assert "--weight-dtype model" in text and "--align 2 " in text
    recipe = text.index("printf '%s\\n' 'calibration_rows: 6' 'calibration_length: 12' > out-recipe.yaml")
    assert recipe < text.index("--recipe out-recipe.yaml") < text.index("neuronmm evaluate")
    assert re.search(r"neuronmm benchmark \S+out --baseline \S+dense .* --backend cpu --dtype fp32 ", text)
    assert re.search(r"\S+out beside \S+dense, measured on", " ".join(text.split()))
    assert "#000000" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)


def test_figures_of_another_checkpoint_are_said_to_be(measured: Path, tmp_path: Path) -> None:
    config = everything(measured)
    assert "of other checkpoints" not in render(config, "")
    other = tmp_path / "another"
    assert page._of_others(other, ["."]) == page._of_others(other, ["elsewhere/another/"]) == []
    shutil.copytree(config.out, other)
    text = " ".join(render(replace(config, out=str(other)), "").split())
    assert text.count("None of these models is called another: the figures may be of other checkpoints.") == 2


def test_the_recovery_on_another_text_is_a_command_of_its_own(made: Path, tmp_path: Path) -> None:
    report = json.loads((made / "out" / REPORT).read_text())
    report |= {"recover": "lora", "factor_dtype": "int8", "weight_dtype": "model"}
    rows = {"trained": 20, "held_out": 4, "length": 32}
    report["recovery"] = {
        "loss_before": 2.0,
        "loss_after": 1.0,
        "kept": True,
        "rows": rows,
        "text": ["a b.txt", "self"],
    }
    lines = repeating("low", report, [], None)
    assert len(lines) == 3 and " -o low-before " in lines[1] and "--recover" not in lines[1]
    assert "dtype" not in lines[1], "recover takes no rounded factors"
    texts = "--calibration 'a b.txt' --calibration self"
    assert lines[2] == (
        f"neuronmm recover low-before -o low --train lora {texts} --calibration-rows 24 --calibration-length 32 "
        "--factor-dtype int8 --weight-dtype model"
    )
    source = report["calibration"]
    rows |= {"trained": source["rows"] - 1, "held_out": 1, "length": source["length"]}
    report["recovery"]["text"] = source["source"]
    (_, line) = repeating("low", report, [], None)
    assert " -o low " in line and " --recover lora " in line


def test_each_change_of_form_is_a_command(made: Path) -> None:
    report = json.loads((made / "out" / REPORT).read_text())
    report["conversions"] = [{"form": "pivoted", "recovered": False}, {"form": "two", "recovered": True}]
    report |= {"form": "pivoted", "recover": "factors"}
    source = report["calibration"]
    rows = {"trained": source["rows"] - 1, "held_out": 1, "length": source["length"]}
    report["recovery"] = {"kept": True, "rows": rows, "text": source["source"]}
    _, first, second, third, fourth = repeating("low", report, [], None)
    assert " -o low-before-before-before " in first and " --form pivoted" in first and "--recover" not in first
    assert second == "neuronmm convert low-before-before-before -o low-before-before --form two"
    assert third.startswith("neuronmm recover low-before-before -o low-before --train factors ")
    assert fourth == "neuronmm convert low-before -o low --form pivoted"


def test_default_settings_need_no_recipe(made: Path) -> None:
    report = json.loads((made / "out" / REPORT).read_text())
    usual = CompressionConfig()
    report["calibration"] |= {"asked_rows": usual.calibration_rows, "length": usual.calibration_length}
    (line,) = repeating("low", report, [], None)
    assert "recipe" not in line


def test_a_model_that_does_not_fit_or_run_on_a_device_is_said_so(made: Path, tmp_path: Path) -> None:
    compress(made / "dense", tmp_path / "low", config(ratio=0, method="svd", weight_dtype="int8"))
    html = render(PageConfig(str(tmp_path / "low")), "neuronmm report low")
    check_closed(html)
    text = text_of(html)
    assert "No Neuron host runs this checkpoint: its dense weights are stored in int8." in text and "trn3" not in text
    result = run_prediction(PredictionConfig(made / "out"))
    assert page._prediction(result)[-1] == "yes"
    assert page._prediction(replace(result, dense=replace(result.dense, fits=False)))[-1] == "no: dense"


def test_a_page_of_the_checkpoint_alone(checkpoint: Callable[..., Path]) -> None:
    html = render(PageConfig(str(checkpoint())), "neuronmm report out")
    check_closed(html)
    text = text_of(html)
    assert f"the checkpoint has no {REPORT}" in text and "Pareto" not in text and "svd, mlp" in text


def test_strings_of_a_hostile_checkpoint_stay_text(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    settings = json.loads(path.read_text())
    settings["quantization_config"] |= {"method": HOSTILE, "version": HOSTILE}
    path.write_text(json.dumps(settings))
    path = tmp_path / "out" / REPORT
    report = json.loads(path.read_text())
    report |= {"model": HOSTILE, "method": HOSTILE, "targets": HOSTILE}
    report["calibration"]["source"] = HOSTILE
    report["matrices"][0]["name"] = HOSTILE
    texts = {which: {"text": HOSTILE, "loops": True} for which in ("dense", "compressed")}
    report["fidelity"] = {"warnings": [HOSTILE], "samples": [{"prompt": HOSTILE, **texts}], "distance": None}
    path.write_text(json.dumps(report))
    estimate = {"value": 1.5, "standard_error": None}
    quality = {"what": "evaluation", "models": {HOSTILE: {"path": HOSTILE, "dtype": HOSTILE}}}
    quality |= {"text": {"file": HOSTILE}, "notes": [HOSTILE]}
    quality["results"] = [{"measure": HOSTILE, "models": {HOSTILE: estimate}}]
    (tmp_path / "quality.json").write_text(json.dumps(quality))
    shutil.copytree(made / "sweep", tmp_path / "sweep")
    path = tmp_path / "sweep" / "sweep.json"
    document = json.loads(
        path.read_text().replace('"text"', json.dumps(HOSTILE)).replace('"whitened"', json.dumps(HOSTILE))
    )
    path.write_text(json.dumps(document))
    html = render(
        PageConfig(str(tmp_path / "out"), None, [tmp_path / "quality.json"], None, tmp_path / "sweep"), HOSTILE
    )
    check_closed(html)
    assert text_of(html).count(HOSTILE) > 12


def test_two_charts_share_no_id() -> None:
    cells = {(layer, "q"): 0.5 for layer in range(3)}
    found = [set(re.findall(r' id="([^"]+)"', chart)) for chart in
             (page_charts.ratio_map(cells, 3), page_charts.loss_lines(cells, "$x$"))]  # fmt: skip
    assert found[0] and found[1] and not found[0] & found[1]


def test_the_command_never_replaces_a_file(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, words = tmp_path / "page.html", ["report", str(made / "out"), "-o"]
    assert main([*words, str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    before = out.read_bytes()
    inside = made / "out" / "page.html"
    for target in (out, inside, tmp_path / "nowhere" / "page.html", tmp_path):
        assert main([*words, str(target)]) == 2
        printed, err = capsys.readouterr()
        assert printed == "" and err.count("\n") == 1 and str(target) in err
    assert out.read_bytes() == before and not inside.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_dense_model_or_none_is_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("dense", "nowhere", "text.txt"):
        assert main(["report", str(made / model), "-o", str(tmp_path / "page.html")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON document."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from leaves(child, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    result = copy.deepcopy(document)
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return result


@pytest.mark.parametrize("name", ["quality.json", "speed.json", "sweep/sweep.json"])
def test_a_document_with_a_false_value_is_refused_or_drawn(
    name: str, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No exception but a UserError leaves the readers; what they accept can be drawn."""
    monkeypatch.setattr(page_charts, "_svg", lambda *_: "")  # the slowest part
    document = json.loads((measured / name).read_text())
    file = tmp_path / Path(name).name
    refused = drawn = 0
    for path in leaves(document):
        for value in (None, -1, "x", 10**400):
            file.write_text(json.dumps(changed(document, path, value)))
            try:
                if name == "quality.json":
                    read_evaluation(file)
                elif name == "speed.json":
                    page_charts.benchmark_bars(read_benchmark(file))
                else:
                    page_charts.sweep_panels(*read_sweep(tmp_path))
                drawn += 1
            except UserError as error:
                assert str(file) in str(error) or file.name in str(error)
                refused += 1
    assert refused > 20 and drawn > 0


def test_an_evaluation_without_a_possible_score_is_refused(measured: Path, tmp_path: Path) -> None:
    document = json.loads((measured / "quality.json").read_text())
    negative = changed(document, ("results", 0, "models", "model", "value"), -5)
    for other in (negative, {**document, "results": []}):
        (tmp_path / "quality.json").write_text(json.dumps(other))
        with pytest.raises(UserError, match=r"quality\.json"):
            read_evaluation(tmp_path / "quality.json")


def test_a_report_with_a_false_value_is_refused_or_shown(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(made / "out", out)
    document = json.loads((out / REPORT).read_text())
    document["matrices"] = document["matrices"][:1]
    model, predicted = inspect(out), run_prediction(PredictionConfig(out))
    monkeypatch.setattr(page, "inspect", lambda folder: model)  # what the report does not decide is read once
    monkeypatch.setattr(page, "run_prediction", lambda config: predicted)
    for chart in ("ratio_map", "prediction_timeline"):
        monkeypatch.setattr(page_charts, chart, lambda *_: "")
    refused = shown = 0
    for path in leaves(document):
        for value in (None, "x", 10**400):
            (out / REPORT).write_text(json.dumps(changed(document, path, value)))
            try:
                render(PageConfig(str(out)), "")
                shown += 1
            except UserError as error:
                assert REPORT in str(error)
                refused += 1
    assert refused > 20 and shown > 20


def test_accepted_extremes_can_be_drawn(measured: Path, tmp_path: Path) -> None:
    document = json.loads((measured / "speed.json").read_text())
    for path in (("points", 0, "batch"), ("points", 0, "prompt_length"), ("runs",), ("threads",)):
        (tmp_path / "speed.json").write_text(json.dumps(changed(document, path, (1 << 63) - 1)))
        assert len(page_charts.benchmark_bars(read_benchmark(tmp_path / "speed.json"))) == 2
    sweep = json.loads((measured / "sweep" / "sweep.json").read_text())
    for value in (1e-300, 1e300):
        extreme = changed(sweep, ("points", 1, "perplexity", "text", "value"), value)
        (tmp_path / "sweep.json").write_text(json.dumps(extreme))
        assert len(page_charts.sweep_panels(*read_sweep(tmp_path))) == 2


@pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed: pip install playwright")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_without_a_request_or_a_message(scheme: str, measured: Path, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    file = tmp_path / "page.html"
    file.write_text(render(everything(measured), "neuronmm report out"), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
        messages: list[str] = []
        requests: list[str] = []
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(file.as_uri())
        assert messages == [] and requests == [file.as_uri()]
        assert tab.evaluate("document.documentElement.scrollWidth") == 360
        boxes = [svg.bounding_box() for svg in tab.locator("svg").all()]
        assert len(boxes) == 8 and all(box and 250 < box["width"] <= 360 and box["height"] > 60 for box in boxes)
        ink, paper = (tab.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
        bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
        assert (bright[0] > bright[1]) == (scheme == "dark")
        browser.close()

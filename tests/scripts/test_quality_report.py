"""The document of the quality study, written from its points."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
DOCUMENT = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    sys.modules.pop("quality_report", None)
    import quality_report

    return quality_report


def point(name: str, ratio: float, wiki: float, c4: float, targets: str | None = "mlp") -> dict[str, Any]:
    """Return a point as in a sweep's folder; the dense model's has no targets."""
    return {
        "name": name,
        "ratio": ratio,
        **({"targets": targets} if targets else {}),
        "realised_ratio": ratio,
        "bytes": int(1e6 * (1 - ratio)),
        "bits": 16,
        "seconds": 120.0,
        "peak_rss_bytes": 2**30,
        "perplexity": {
            "wiki": {"value": wiki, "standard_error": 1.5},
            "c4": {"value": c4, "standard_error": None},
        },
    }


def test_a_sweeps_points_join_the_tables_and_replace_what_they_repeat(script: ModuleType, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    new = [point("whitened", 0.2, 40, 300), point("anchored", 0.2, 30, 310), point("whitened+all", 0.2, 50, 60, "all")]
    new[1]["speed"] = {"tokens_per_second": 50.0, "slowest": 45.0, "fastest": 52.0, "speed_up": 1.25}
    for index, one in enumerate(new):
        (sweep / f"{index}.point.json").write_text(json.dumps(one))
    dense = point("dense", 0.0, 10, 20, targets=None)
    result = {
        "model": "tiny",
        "texts": {"wiki": "Wiki", "c4": "C4"},
        "costs": ["bytes"],
        "points": [dense, point("whitened", 0.2, 99, 99)],
    }
    (tmp_path / "quality.json").write_text(json.dumps(result))
    (tmp_path / "quality.md").write_text(f"Head.\n\n{script.BEGIN}\nold\n{script.END}\n\nFoot.\n")
    script.main(tmp_path, [sweep])
    text = (tmp_path / "quality.md").read_text()
    assert text.startswith("Head.\n") and text.endswith("\n\nFoot.\n") and "old" not in text and "99" not in text
    rows = [line for line in text.splitlines() if line.startswith("| 0.2")]
    assert rows == [
        "| 0.2 | whitened | 20.00% | 0.8 | 40 ± 1.5 | **300** | 2 | 1.00 |  |  |",
        "| 0.2 | anchored | 20.00% | 0.8 | **30 ± 1.5** | 310 | 2 | 1.00 | 50.0 (45.0 to 52.0) | 1.25 |",
        "| 0.2 | whitened | 20.00% | 0.8 | **50 ± 1.5** | **60** | 2 | 1.00 |  |  |",
    ]
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    stored = json.loads((tmp_path / "quality.json").read_text())
    assert stored["costs"] == ["bytes", "speed"]
    assert [one["name"] for one in stored["points"]] == ["dense", "whitened+all", "whitened", "anchored"]


def test_measurements_of_a_model_stay_while_the_model_stays(script: ModuleType, tmp_path: Path) -> None:
    fast = {**point("whitened", 0.2, 40, 300), "speed": {"tokens_per_second": 50.0}}
    same, other = {**point("whitened", 0.2, 40, 300), "seconds": 60.0}, point("whitened", 0.2, 41, 300)
    for new, merged in ((same, {**fast, "seconds": 60.0}), (other, other)):
        (tmp_path / "0.point.json").write_text(json.dumps(new))
        assert script.merge([fast], [tmp_path]) == [merged]


def test_the_excess_over_dense_is_a_share_of_the_peers(script: ModuleType) -> None:
    points = [
        point("dense", 0.0, 10, 20, targets=None),
        *(point("SVD-LLM", ratio, 50, 220) for ratio in (0.2, 0.3)),
        point("whitened+global", 0.3, 20, 120),
        point("whitened", 0.2, 40, 420),
        point("svd", 0.2, 1e6, 1e6),
        point("SVD-LLM+all", 0.2, 30, 30, "all"),
        point("whitened+all", 0.2, 12, 21, "all"),
    ]
    assert [line for line in script.shares(points).splitlines() if "--" not in line] == [
        "| MLP | 0.2 | 0.3 |",
        "| whitened | 75% / 200% |  |",
        "| whitened+global |  | 25% / 50% |",
        "",
        "| MLP and attention | 0.2 |",
        "| whitened | 10% / 10% |",
    ]


def test_the_document_shows_what_the_data_holds(script: ModuleType) -> None:
    result = json.loads((DOCUMENT / "quality.json").read_text(encoding="utf-8"))
    written = (DOCUMENT / "quality.md").read_text(encoding="utf-8").partition(script.BEGIN)[2].partition(script.END)[0]
    assert written.strip() == script.content(result["points"], list(result["texts"].values()))

"""``jaxinfer plan``: verdicts, their exit codes, and mistakes."""

import json
from pathlib import Path

import pytest

from jaxinfer.planning.compile import CompiledProgram
from jaxinfer.planning.engine_window import EngineDeployment
from jaxinfer.planning.suggest import Alternatives, Candidate

HLO = "planning/hlo/moving_hlo.txt"

TINY = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 1 << 17,
}
MISTAKES = {
    "unknown chip": (["--topology", "h100:8"], ["'h100:8'", "v5e"]),
    "no shape": (["--topology", "v5e"], ["'v5e'", "v5e:2x4"]),
    "a shape that is not": (["--topology", "v5e:3x5"], ["'v5e:3x5'"]),
    "unknown model": (["--topology", "v5e:1x1", "--model", "llama-9"], ["'llama-9'", "llama-2-7b"]),
    "other devices": (["--topology", "v5e:2x4", "--tensor", "4"], ["v5e:2x4", "8 devices", "tensor=4"]),
    "no axis": (["--topology", "v5e:2x4", "--mesh", "model=8"], ["model=8", "tensor=4"]),
    "two meshes": (["--topology", "v5e:2x4", "--mesh", "tensor=8", "--tensor", "8"], ["--tensor", "--mesh"]),
    "indivisible batch": (["--topology", "v5e:2x4", "--mesh", "data=8", "--batch", "12"], ["12", "data=8"]),
    "stages": (["--topology", "v5e:2x4", "--mesh", "pipeline=8"], ["30 layers", "pipeline=8", "divisor of 30"]),
    "too long": (["--model", "opt-1.3b", "--topology", "v5e:1x1", "--max-len", "2049"], ["2049", "2048"]),
    "too large a slice": (["--topology", "v5e:1000x1000"], ["v5e:1000x1000", "16"]),
    "a flat slice of a deep chip": (["--topology", "v4:2x2"], ["v4:2x2", "v4:2x2x1"]),
    "nobody's folder": (["--model", "~nobodyx/foo", "--topology", "v5e:1x1"], ["~nobodyx/foo"]),
    "unknown dtype": (["--topology", "v5e:1x1", "--dtype", "int3"], ["int3"]),
    "unknown exactness": (["--topology", "v5e:1x1", "--exact", "nearly"], ["'nearly'", "bits, margin"]),
    "no rows": (["--topology", "v5e:1x1", "--batch", "0"], ["--batch", "'0'"]),
    "no PNG": (["--topology", "v5e:1x1", "--plot", "plan.pdf"], ["--plot", "plan.pdf", ".png"]),
    "no topology": ([], ["--topology"]),
    "rows of no engine": (["--topology", "v5e:1x1", "--rows", "4"], ["--rows", "--engine"]),
    "an engine of batches": (["--topology", "v5e:1x1", "--engine", "--batch", "4"], ["--batch", "--engine"]),
    "an odd page": (["--topology", "v5e:1x1", "--engine", "--page-size", "48"], ["page_size=48", "power of two"]),
    "an engine on other axes": (
        ["--topology", "v5e:2x4", "--engine", "--mesh", "pipeline=8"],
        ["data, expert and tensor alone", "pipeline=8"],
    ),
}


@pytest.mark.parametrize(("arguments", "named"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(run, arguments, named):
    outcome = run("plan", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert len(outcome.error_lines) == 1
    assert all(name in outcome.error_lines[0] for name in named)


def test_a_missing_libtpu_is_named_with_its_mend(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = run("plan", "--topology", "v5e:1x1")
    assert outcome.code == 2
    assert 'pip install "jaxinfer[tpu]"' in outcome.error_lines[0]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_what_fits_is_reported_and_drawn(run, tiny):
    plot = tiny / "plan.png"
    outcome = run("plan", "--model", tiny, "--topology", "v5e:1x1", "--prompt-tokens", "16", "--json", "--plot", plot)
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["fits"]
    assert found["hbm_total_bytes"] >= found["weights_bytes"] + found["cache_bytes"] + found["temporaries_bytes"]
    assert found["hbm_total_bytes"] < found["hbm_capacity_bytes"] == int(15.75 * 2**30)
    assert set(found["programs"]) == {"prefill", "decode"}
    decode = found["programs"]["decode"]
    assert decode["hbm_bytes"] >= decode["floor_bytes"] >= found["cache_bytes"]
    assert decode["flops"] > 0
    assert decode["collectives"] == {}
    assert decode["roofline_seconds"] == max(decode[f"{name}_seconds"] for name in ("hbm", "mxu", "ici"))
    assert decode["latency_seconds"] == 0
    assert decode["compile_seconds"] > 0
    assert (found["alternatives"], found["meshes"], found["speculation"]) == (None, None, None)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_engine_is_told_in_lines_and_in_json(run, tiny, monkeypatch):
    def compiled(asked: EngineDeployment, rows: int) -> CompiledProgram:
        pool, hlo = asked.pages_for(rows) * asked.page_bytes, (Path(__file__).parents[1] / HLO).read_text()
        return CompiledProgram(asked.weights_bytes + pool, pool, pool, pool // 10, 0, pool, 1.5, {}, hlo)

    monkeypatch.setattr("jaxinfer.planning.engine_plan.compile_window", compiled)
    asked = ("plan", "--engine", "--model", tiny, "--topology", "v5e:1x1", "--rows", "4", "--page-size", "128")
    told = run(*asked)
    assert told.code == 0
    lines = told.out.splitlines()
    assert lines[0].endswith("texts of 2048 tokens on 17 pages of 128")
    assert lines[1].startswith("fits: 4 rows; beside weights 0.08 and temporaries 0.05 GiB (10.0% of the rows' pages)")
    assert lines[-1] == "pools are written where they lie; pages are gathered before they are attended to"
    found = json.loads(run(*asked, "--json").out)
    assert (found["rows_asked"], found["window"]["rows"], found["pages_per_row"]) == (4, 4, 17)
    assert f"hold {found['window']['pages']} pages of" in lines[1]
    many = run(*asked[:-4], "--rows", "1000000")
    assert many.code == 1
    assert many.out.splitlines()[1].startswith("does not fit: 1000000 rows need ")


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_what_does_not_fit_is_told_by_the_exit_code_and_with_what_does(run, tiny, monkeypatch):
    small = Candidate("v5e:1x1", "tensor=1", 1, 1, 1 << 17, 8 << 30, 94.6, 3.0)
    monkeypatch.setattr(
        "jaxinfer.planning.suggest.find_alternatives", lambda *arguments: Alternatives(None, small, None)
    )
    asked = ("--model", tiny, "--topology", "v5e:1x1", "--batch", "2", "--max-len", str(1 << 17))
    outcome = run("plan", *asked, "--strategy", "lookahead", "--prompt-tokens", "16")
    assert outcome.code == 1
    assert outcome.error_lines == []
    lines = outcome.out.splitlines()
    assert lines[1].startswith("does not fit: 16.")
    assert "more than the 15.75 there are: weights 0.08, cache 16.0" in lines[1]
    assert [line.split()[0] for line in lines if "*  " in line] == ["prefill*", "decode*", "verify*"]
    assert "  smallest slice: none" in lines
    assert (
        "  largest batch: v5e:1x1 as tensor=1, batch 1, 131072 tokens a row: 8.00 GiB a device, at most 95 tok/s"
        in lines
    )
    assert any(line.startswith("lookahead: a step of ") for line in lines)

"""The command line, and the demonstration behind it."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from uncollapse import __version__, cli, demo
from uncollapse.registry import CURES, LOSSES, METRICS

SMALL = demo.Setup(blocks=3, dim=16, heads=2, ffn=32, vocabulary=20, sequences=2, tokens=8)


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_version(runner: CliRunner) -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"uncollapse {__version__}\n")


@pytest.mark.parametrize(("kind", "registry"), [("metrics", METRICS), ("cures", CURES), ("losses", LOSSES)])
def test_list_shows_every_entry(runner: CliRunner, kind: str, registry: dict[str, object]) -> None:
    result = runner.invoke(cli.app, ["list", kind])
    assert result.exit_code == 0
    assert len(registry) > 4
    assert [name for name in registry if f" {name} " not in result.stdout] == []


def test_a_wrong_kind_is_one_sentence(runner: CliRunner) -> None:
    result = runner.invoke(cli.app, ["list", "layers"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "There is no list of 'layers'; choose one of metrics, cures, losses.\n"


def test_an_unknown_command_is_a_usage_error(runner: CliRunner) -> None:
    assert runner.invoke(cli.app, ["mend"]).exit_code == 2


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("It broke\n  in two."), "It broke in two."),
        (KeyError("No such name."), "No such name."),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_an_error_is_one_sentence(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(demo, "main", fail)
    result = runner.invoke(cli.app, ["demo"])
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"Error: {sentence}\n")
    assert runner.invoke(cli.app, ["--debug", "demo"]).exception is error


def test_interruption_exits_with_130(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "main", interrupt)
    result = runner.invoke(cli.app, ["demo"])
    assert (result.exit_code, result.stderr) == (130, "")


def test_demo_prints_and_writes_the_same_figures(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = demo.run
    monkeypatch.setattr(demo, "run", lambda _: full(SMALL))
    target = tmp_path / "new" / "rank.json"
    result = runner.invoke(cli.app, ["demo", "--json", str(target)])
    assert result.exit_code == 0
    written = json.loads(target.read_text(encoding="utf-8"))
    assert f"{written['plain'][0]['effective_rank']:.1f}" in result.stdout
    assert f"Figures written to {target}." in result.stdout


def test_run_records_what_is_needed_to_repeat_it() -> None:
    result = demo.run(SMALL)
    assert demo.Setup(**result["config"]) == SMALL
    assert result["versions"] == {"torch": torch.__version__, "uncollapse": __version__}
    assert result["seed"] == SMALL.seed
    assert [row["block"] for row in result["plain"]] == [0, 1, 2, 3]
    again = demo.run(SMALL)
    assert (result["plain"], result["contra_norm"]) == (again["plain"], again["contra_norm"])


def test_build_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    demo.build(SMALL)
    assert torch.equal(torch.rand(3), expected)


def test_rows_are_the_measures_of_the_papers() -> None:
    x, blocks = demo.build(SMALL)
    row = demo.trace(x, blocks, 0.0)[0]
    ranks, cosines = [], []
    for tokens in x.detach().double():
        share = torch.linalg.svdvals(tokens)
        share = share / share.sum()
        ranks.append(float(torch.exp(-(share * share.log()).sum())))
        unit = torch.nn.functional.normalize(tokens, dim=-1)
        n = len(unit)
        cosines.append(sum(float(unit[i] @ unit[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1)))
    assert row.effective_rank == pytest.approx(sum(ranks) / len(ranks), abs=1e-4)
    assert row.mean_cosine == pytest.approx(sum(cosines) / len(cosines), abs=1e-4)


def test_collapse_is_seen_and_mended() -> None:
    setup = demo.Setup(blocks=24)
    x, blocks = demo.build(setup)
    plain, mended = demo.trace(x, blocks, 0.0), demo.trace(x, blocks, setup.scale)
    assert plain[0] == mended[0]
    assert plain[-1].effective_rank < 0.75 * plain[0].effective_rank
    assert mended[-1].effective_rank > 0.9 * mended[0].effective_rank
    assert plain[-1].mean_cosine > 0.6
    assert abs(mended[-1].mean_cosine) < 0.1

"""A sweep of settings: the grid, what is chosen, several calibrations on the same held-out rows, leaving one task out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from tiny_pairs import GEOMETRIES, TinyPair, blocks, tiny_pair

from kvbench.calibration.corpus import TokenBlocks
from kvbench.calibration.moments import Calibration
from kvbench.cli.fit import recorded
from kvbench.cli.sweep_output import recipe_yaml, stored_sweep, table
from kvbench.errors import BadInputError
from kvbench.mappers.mlp import MLP
from kvbench.mappers.recipes import load_recipe
from kvbench.mappers.ridge import Ridge
from kvbench.mappers.sweep import Data, JudgedOn, Trial, choose, leave_one_out, parse_grid, sweep, varied
from kvbench.scoring.sweep import AgreementJudge, nested

GQA = next(g for g in GEOMETRIES if g.name == "gqa")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("sweep") / "moments", GQA)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """The same models on other tokens."""
    return tiny_pair(tmp_path_factory.mktemp("sweep") / "other", GQA, tokens=blocks(seed=5))


def test_grid_keeps_order_and_lists_with_commas():
    assert parse_grid(["k=1, 2,all", "lambda=0.1"]) == {"k": ["1", "2", "all"], "lambda": ["0.1"]}
    assert parse_grid(["selection=0,1|1,2"]) == {"selection": ["0,1", "1,2"]}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["k"], "not of the form"),
        (["k="], "not of the form"),
        (["k=1,,2"], "not of the form"),
        (["k=1", "k=2"], "given twice"),
        (["k=1,1"], "names a value twice"),
        (["rows=1,2"], "several MOMENTS or --sequences"),
    ],
)
def test_bad_grids(axes, message):
    with pytest.raises(BadInputError, match=message):
        parse_grid(axes)


def test_every_point_is_the_fit_of_its_recipe(pair):
    grid = parse_grid(["k=1,all", "lambda=0.01,5", "selection=top_k,greedy"])
    trials = sweep(Ridge(), grid, [Data("a", pair.calibration)])
    assert [t.settings for t in trials[:3]] == [
        {"k": "1", "lambda": "0.01", "selection": "top_k"},
        {"k": "1", "lambda": "0.01", "selection": "greedy"},
        {"k": "1", "lambda": "5", "selection": "top_k"},
    ]
    assert len(trials) == 8
    for trial in trials:
        k = trial.settings["k"]
        alone = Ridge(k=k if k == "all" else int(k), lambda_=float(trial.settings["lambda"]), selection=trial.settings["selection"])
        figures = alone.fit(pair.calibration).describe()
        assert trial.recipe == alone.configuration()
        for mine, name in ((trial.r2_k, "r2_k_heldout"), (trial.r2_v, "r2_v_heldout")):
            assert mine == pytest.approx(sum(figures[name]) / len(figures[name]))
        assert trial.score == pytest.approx((trial.r2_k + trial.r2_v) / 2)
        assert trial.parameters == figures["parameters"]
        assert trial.values["k"] == {"1": 1, "all": len(pair.calibration.source_layers)}[k]
    best = max(trials, key=lambda t: t.score)
    assert [t.chosen for t in trials].count(True) == 1
    assert next(t for t in trials if t.chosen).score == best.score


def test_a_point_that_cannot_be_fitted_says_why_and_does_not_stop_the_others(pair):
    trials = sweep(Ridge(), {"k": ["1", "99"], "lambda": ["1", "-1", "x"]}, [Data("a", pair.calibration)])
    reasons = [t.failure for t in trials]
    assert reasons[0] is None
    assert "zero or a positive number" in reasons[1]
    assert "is not a number" in reasons[2]
    assert "use 1 to 3, or 'all'" in reasons[3]
    with pytest.raises(BadInputError, match=r"no setting could be fitted.*use 1 to 3"):
        sweep(Ridge(), {"k": ["99"]}, [Data("a", pair.calibration)])
    with pytest.raises(BadInputError, match="has no setting 'kk'"):
        sweep(Ridge(), {"kk": ["1"]}, [Data("a", pair.calibration)])


def test_other_text_is_judged_on_the_same_heldout_rows(pair, other):
    data = [Data("one", pair.calibration), Data("two", other.calibration)]
    trials = sweep(Ridge(k=2), {}, data)
    assert [t.settings["calibration"] for t in trials] == ["one", "two"]
    # The slow way: the second fit applied to the first pair's held-out sequences, R2 from the rows themselves.
    mapper = Ridge(k=2).fit(JudgedOn(other.calibration, pair.calibration))
    from kvbench.calibration.sequences import load_tokens, run_pair

    batch = run_pair(pair.source, pair.target, load_tokens(pair.calibration).heldout, queries=False)
    found = []
    for t in range(pair.target.layers):
        keys, _ = mapper.map_layer(batch.source, t)
        wanted, mapped = (x[:, ::2].reshape(-1, pair.calibration.target_width).double() for x in (batch.target.keys[t], keys))
        lost, whole = (wanted - mapped).square().sum(0), (wanted - wanted.mean(0)).square().sum(0)
        found.append(float((1 - lost / whole).mean()))
    assert trials[1].r2_k == pytest.approx(sum(found) / len(found), abs=1e-4)


def test_recipes_that_train_are_not_compared_over_texts(pair, other):
    with pytest.raises(BadInputError, match="judges on the held-out sequences of its own calibration"):
        sweep(MLP(widths=(4,), epochs=1, k=1), {}, [Data("one", pair.calibration), Data("two", other.calibration)])


def test_other_models_are_refused(pair, tmp_path):
    import dataclasses

    foreign = tiny_pair(tmp_path / "m", dataclasses.replace(GQA, source_hidden=40))
    with pytest.raises(BadInputError, match="different source weights"):
        sweep(Ridge(k=1), {}, [Data("one", pair.calibration), Data("two", foreign.calibration)])


def test_nested_sizes_are_prefixes(pair, tmp_path):
    models = (pair.source, pair.target)
    small, whole = nested(pair.calibration, [2, 6], tmp_path, models)
    assert whole is pair.calibration
    assert small.manifest["data"]["sequences"] == 2
    tokens = blocks()
    direct = tiny_pair(tmp_path / "direct", GQA, tokens=TokenBlocks(tokens.fit[:2], tokens.heldout, 2, 3)).calibration
    for kind in ("k", "v", "k_rotated"):
        # Sums over batches of another size differ by float32 rounding only.
        torch.testing.assert_close(small.moments("fit", kind).xx, direct.moments("fit", kind).xx, rtol=1e-4, atol=1e-3)
    assert nested(pair.calibration, [2], tmp_path, models)[0].path == small.path
    with pytest.raises(BadInputError, match="holds 6 fit sequences; use 1 to 6"):
        nested(pair.calibration, [7], tmp_path, models)


@torch.no_grad()
def test_agreement_against_two_plain_runs(pair):
    from kvbench.calibration.sequences import load_tokens

    tokens, prefix = load_tokens(pair.calibration).heldout, 24
    mapper = Ridge(k=2).fit(pair.calibration)
    scores = AgreementJudge(pair.source, pair.target, tokens, prefix, batch_size=2)([mapper])[0]
    same, divergence, count = 0, 0.0, 0
    for row in tokens:
        own = pair.target.model(input_ids=torch.tensor(row.tolist())[None]).logits[0, prefix:].log_softmax(-1)
        mapped = _plain_mapped_run(pair, mapper, row.tolist(), prefix)
        same += int((own.argmax(-1) == mapped.argmax(-1)).sum())
        divergence += float(torch.nn.functional.kl_div(mapped, own, log_target=True, reduction="sum"))
        count += len(own)
    assert scores["held-out agreement"] == same / count
    assert scores["held-out KL, nats per token"] == pytest.approx(divergence / count, rel=1e-3)
    with pytest.raises(BadInputError, match="prefix of 40 tokens"):
        AgreementJudge(pair.source, pair.target, tokens, 40)


@torch.no_grad()
def _plain_mapped_run(pair: TinyPair, mapper, row: list[int], prefix: int) -> torch.Tensor:
    """A transformers cache filled by hand, then the model's own forward."""
    from transformers import DynamicCache

    from kvbench.kv.capture import to_content

    content = to_content(pair.source.prefill([row[:prefix]]), pair.source.rope)
    cos, sin = pair.target.rope.cos_sin(content.positions)
    filled = []
    for layer in range(pair.target.layers):
        keys, values = mapper.map_layer(content, layer)
        filled.append((pair.target.rope.apply(keys, cos, sin).transpose(1, 2), values.transpose(1, 2)))
    positions = torch.arange(prefix, len(row))[None]
    out = pair.target.model(input_ids=torch.tensor([row[prefix:]]), position_ids=positions, cache=DynamicCache(ddp_cache_data=filled))
    return out.logits[0].log_softmax(-1)


def _trial(k: str, parameters: int, **scores: float) -> Trial:
    return Trial({"k": k}, {"k": float(k)}, "a", {"method": "ridge", "k": int(k)}, 0.5, 0.5, parameters, 0.1, dict(scores))


def test_of_equals_the_smaller_is_chosen():
    trials = [_trial("4", 40, score=0.5), _trial("2", 20, score=0.5), _trial("1", 10, score=0.4)]
    assert choose(trials) is trials[1]


def test_leaving_one_task_out_by_hand():
    # Means: k=1 0.50, k=2 0.60, k=4 0.55. Without a: 0.45, 0.45, 0.70; without b: 0.55, 0.75, 0.40; without c: 0.50, 0.60, 0.55.
    rows = {"1": (0.6, 0.4, 0.5), "2": (0.9, 0.3, 0.6), "4": (0.25, 0.85, 0.55)}
    trials = [_trial(k, int(k), **dict(zip(("mean", "a", "b", "c"), (sum(v) / 3, *v), strict=True))) for k, v in rows.items()]
    folds = leave_one_out(trials, ["a", "b", "c"])
    assert [(f.task, f.settings["k"], f.moved) for f in folds] == [("a", "4", True), ("b", "2", False), ("c", "2", False)]
    assert (folds[0].score, folds[0].score_of_choice) == (0.25, 0.9)
    with pytest.raises(BadInputError, match="two or more choosing tasks"):
        leave_one_out(trials, ["a"])


def test_what_is_written_reads_back(pair, tmp_path: Path):
    trials = sweep(Ridge(), parse_grid(["k=1,3", "lambda=0.01,100,-1"]), [Data("words", pair.calibration)])
    chosen = next(t for t in trials if t.chosen)
    best = varied(Ridge(), chosen.settings)
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recorded(best), trials))
    assert load_recipe(str(tmp_path / "recipe.yaml")) == best
    assert "lambda" in yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    stored = stored_sweep(trials, ["k", "lambda"], None)
    assert (stored.parameter, stored.log_scale, stored.figure) == ("k", False, "held-out R2")
    assert sorted({p.recipe for p in stored.points}) == ["lambda=0.01", "lambda=100"]
    assert [p.score for p in stored.points if p.chosen] == [chosen.score]
    by_lambda = stored_sweep(trials, ["k", "lambda"], "lambda")
    assert by_lambda.log_scale
    assert {p.recipe for p in by_lambda.points} == {"k=1", "k=3"}
    assert stored_sweep(trials, ["k", "lambda"], "parameters").points[0].value == trials[0].parameters
    with pytest.raises(BadInputError, match=r"--x rank; it is one of k, lambda, parameters"):
        stored_sweep(trials, ["k", "lambda"], "rank")
    lines = table(trials).splitlines()
    assert len(lines) == 1 + len(trials)
    assert lines[0].startswith("k,lambda,held-out R2,r2_k,r2_v,parameters,seconds,chosen,failure")
    assert "zero or a positive number" in lines[3]


def test_content_space_is_an_axis(pair):
    trials = sweep(Ridge(k=1), {"content_space": ["true", "false"]}, [Data("a", pair.calibration)])
    assert trials[0].recipe["content_space"] is True
    assert trials[0].r2_k != trials[1].r2_k
    assert trials[0].r2_v == pytest.approx(trials[1].r2_v, abs=0.2)


def test_moments_are_read_once(pair, other):
    again = Calibration(other.calibration.path)
    assert JudgedOn(again, pair.calibration).moments("fit", "v") is again.moments("fit", "v")
    assert JudgedOn(again, pair.calibration).moments("heldout", "v") is pair.calibration.moments("heldout", "v")

"""Bad input: one message each, naming the value and the remedy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from planted import Planted, noise, plant
from tiny_pairs import GEOMETRIES, blocks, tiny_model, tiny_pair
from torch import Tensor

from kvbench.calibration.corpus import TokenBlocks
from kvbench.calibration.harvest import Harvest, HarvestSettings
from kvbench.calibration.moments import Calibration
from kvbench.calibration.sequences import load_tokens, pair_of, save_tokens
from kvbench.errors import ArtifactError, BadInputError
from kvbench.mappers.attn_repair import AttentionRepair
from kvbench.mappers.base import Recipe
from kvbench.mappers.head_local import HeadLocal
from kvbench.mappers.low_rank import LowRank
from kvbench.mappers.mlp import MLP
from kvbench.mappers.registry import recipe_class
from kvbench.mappers.residual import Residual
from kvbench.mappers.ridge import Ridge


def relation(x: Tensor, kind: str) -> Tensor:
    return x[:, :24] + noise(x[:, :24], 0.1)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return plant(tmp_path_factory.mktemp("planted") / "m", relation)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Ridge(k=5), "k = 5, but the calibration has 4 candidate source layers; use 1 to 4, or 'all'"),
        (Ridge(k=0), "k = 0, but the calibration has 4 candidate source layers"),
        (Ridge(k="many"), "k = 'many'; it is a number of source layers or 'all'"),
        (Ridge(k=1, lambda_=-0.5), "lambda = -0.5; it must be zero or a positive number"),
        (Ridge(k=1, lambda_=float("nan")), "lambda = nan; it must be zero or a positive number"),
        (Ridge(k=1, lambda_kind="percent"), "lambda_kind = 'percent'; it is 'absolute'"),
        (Ridge(k=1, select_on="test"), "select_on = 'test'; it is 'heldout' or 'fit'"),
        (Ridge(k=1, selection="best"), "selection = 'best'; it is one of top_k, greedy, depth, all, or source layers"),
        (Ridge(k=1, selection="0,7"), "source layer 7 is not among the calibrated candidates"),
        (Ridge(k=1, selection="0;1"), "selection lists source layers for 2 target layers, but the target has 3"),
        (Ridge(k=1, content_space=False), "holds no moments of kind 'k_rotated'"),
        (LowRank(k=1, rank=9), "rank = 9, but a target layer is 8 features wide; use 1 to 8"),
        (LowRank(k=1, rank=0), "rank = 0, but a target layer is 8 features wide"),
        (LowRank(k=1), "needs either rank or energy"),
        (LowRank(k=1, rank=2, energy=0.5), "needs either rank or energy"),
        (LowRank(k=1, energy=1.5), "energy = 1.5; it is a share of the fitted variance"),
        (MLP(k=1, epochs=0), "recipe 'mlp' has epochs = 0; all of them must be positive"),
        (MLP(k=1, widths=()), "recipe 'mlp' has widths = "),
        (Residual(k=1, closed_form="mlp"), "closed_form = 'mlp'; it is one of ridge, head_local"),
        (Residual(k=1, bottleneck=0), "recipe 'residual' has bottleneck = 0"),
        (Residual(k=1, learning_rate=0.0), "learning_rate = 0.0"),
        (AttentionRepair(k=1, queries=0), "queries = 0, batch_size = 8; both must be at least 1"),
        (AttentionRepair(k=5), "k = 5, but the calibration has 4 candidate source layers"),
    ],
    ids=lambda value: value.method if isinstance(value, Recipe) else None,
)
def test_settings_that_do_not_suit(recipe: Recipe, message: str, planted: Planted) -> None:
    with pytest.raises((BadInputError, ArtifactError)) as raised:
        recipe.fit(planted.calibration)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_text_settings_reach_the_fields() -> None:
    recipe = recipe_class("mlp").from_settings({"widths": "64,32", "k": "all", "selection": "0,1", "learning_rate": "0.01"})
    assert recipe == MLP(widths=(64, 32), k="all", selection="0,1", learning_rate=0.01)
    assert recipe_class("mlp").from_settings({"widths": [64, 32], "epochs": 3}) == MLP(widths=(64, 32), epochs=3)
    for settings, message in (
        ({"k": 2.5}, "recipe 'ridge': k = 2.5, but it is of type int or str"),
        ({"lambda_": None}, "recipe 'ridge': lambda_ = None, but it is of type float"),
        ({"lambda_": True}, "recipe 'ridge': lambda_ = True, but it is of type float"),
        ({"selection": 3}, "recipe 'ridge': selection = 3, but it is of type str"),
        ({"content_space": 1}, "recipe 'ridge': content_space = 1, but it is of type bool"),
    ):
        with pytest.raises(BadInputError) as raised:
            recipe_class("ridge").from_settings(settings)
        assert str(raised.value) == message
    assert recipe_class("low_rank").from_settings({"rank": "16", "energy": "none"}) == LowRank(rank=16)


@pytest.mark.parametrize("recipe", [Ridge(k=2, lambda_=0.0), HeadLocal(k=2, lambda_=0.0), Ridge(k=2, lambda_=0.0, selection="greedy")], ids=repr)
def test_lambda_zero_on_a_singular_gram(recipe: Recipe, tmp_path: Path) -> None:
    """Source layer 1 is a copy of layer 0, coordinate 0 of every layer is constant."""

    def copied(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, ::4] = 1.0
        x[:, 8:16] = x[:, :8]
        return x

    planted = plant(tmp_path / "m", relation, source=copied)
    with pytest.raises(BadInputError, match=r"singular at lambda = 0.0 \(absolute\)|can be solved for target layer 0 at lambda = 0.0"):
        recipe.fit(planted.calibration)


def test_lambda_zero_is_allowed_where_it_works(planted: Planted) -> None:
    assert min(Ridge(k=1, lambda_=0.0).fit(planted.calibration).describe()["r2_k_heldout"]) > 0.9


def test_more_features_than_rows_is_warned_and_shown(tmp_path: Path) -> None:
    planted = plant(tmp_path / "m", relation, fit_rows=20)
    with pytest.warns(UserWarning, match="ridge: 32 features per target coordinate but only 20 calibration rows; in-sample R2 means nothing"):
        mapper = Ridge(k="all").fit(planted.calibration)
    assert mapper.describe()["rows_per_feature"] == 0.625
    assert min(mapper.describe()["r2_k_insample"]) > 0.999


def test_a_target_layer_that_does_not_vary_has_no_r2(tmp_path: Path) -> None:
    def constant(x: Tensor, kind: str) -> Tensor:
        y = relation(x, kind)
        y[:, :8] = 2.0
        return y

    details = Ridge(k=1).fit(plant(tmp_path / "m", constant).calibration).describe()
    assert details["r2_k_heldout"][0] is None
    assert details["r2_k_heldout"][1] > 0.9


@pytest.mark.parametrize(("what", "layer"), [("k_proj", 1), ("v_proj", 0)])
def test_non_finite_activations_name_model_layer_and_batch(what: str, layer: int, tmp_path: Path) -> None:
    models = [
        tiny_model(name, layers=3, hidden=32, query_heads=4, kv_heads=2, dtype=torch.float32, seed=seed) for name, seed in (("small", 1), ("big", 2))
    ]
    projection = getattr(models[1].model.model.layers[layer].self_attn, what)
    with torch.no_grad():
        projection.weight[0, 0] = float("inf")
    harvest = Harvest(models[0], models[1], blocks(), {"name": "x", "seed": 0}, HarvestSettings(batch_size=2), tmp_path / "m")
    kind = "keys" if what == "k_proj" else "values"
    with pytest.raises(BadInputError, match=f"big: non-finite {kind} in layer {layer}, batch at fit sequence 0"):
        harvest.run()


def test_recipes_that_run_models_need_the_tokens(planted: Planted) -> None:
    for recipe in (AttentionRepair(k=1), MLP(k=1), Residual(k=1)):
        assert recipe.needs_models
        with pytest.raises(ArtifactError, match=r"has no tokens.safetensors, which this recipe runs through the models; calibrate again"):
            recipe.fit(planted.calibration)


def test_tokens_and_models_must_be_those_of_the_moments(tmp_path: Path) -> None:
    pair = tiny_pair(tmp_path / "m", GEOMETRIES[1])
    assert np.array_equal(load_tokens(pair.calibration).fit, blocks().fit)
    other = tiny_model("other", layers=5, hidden=48, query_heads=4, kv_heads=2, dtype=torch.float32, seed=9)
    with pytest.raises(ArtifactError, match=r"was fitted for target 'tiny-target' with weights .* but 'other' has"):
        pair_of(pair.calibration, (pair.source, other))
    changed = dataclasses.replace(load_tokens(pair.calibration), fit=blocks(seed=5).fit)
    save_tokens(TokenBlocks(changed.fit, changed.heldout, 1, 1), pair.calibration.path)
    with pytest.raises(ArtifactError, match=r"holds other tokens \(.*\) than the moments were taken from"):
        load_tokens(Calibration(pair.calibration.path))

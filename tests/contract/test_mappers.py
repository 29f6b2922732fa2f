"""Every recipe x every geometry x float32 and bfloat16: fit, map a batch of unequal lengths, store, load, map again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_pairs import GEOMETRIES, Geometry, TinyPair, tiny_pair
from torch import Tensor

from kvbench.errors import BadInputError
from kvbench.kv.capture import to_content
from kvbench.kv.content import ContentKV
from kvbench.mappers.artifact import load_mapper, save_mapper
from kvbench.mappers.attn_repair import AttentionRepair
from kvbench.mappers.base import Mapper, Recipe
from kvbench.mappers.head_local import HeadLocal
from kvbench.mappers.low_rank import LowRank
from kvbench.mappers.mean import Mean
from kvbench.mappers.mlp import MLP
from kvbench.mappers.registry import BUILT_IN, recipe_class
from kvbench.mappers.residual import Residual
from kvbench.mappers.ridge import Ridge

RECIPES: dict[str, Recipe] = {
    "ridge": Ridge(k=2, lambda_=1.0),
    "ridge_rotated": Ridge(k=2, lambda_=1.0, content_space=False),
    "ridge_greedy": Ridge(k=2, lambda_=1.0, selection="greedy"),
    "head_local": HeadLocal(k=2, lambda_=1.0),
    "head_local_rotated": HeadLocal(k=2, lambda_=1.0, content_space=False),
    "attn_repair": AttentionRepair(k=2, lambda_=1.0, batch_size=4),
    "attn_repair_rotated": AttentionRepair(k=2, lambda_=1.0, batch_size=4, content_space=False),
    "low_rank": LowRank(k=2, lambda_=1.0, rank=3),
    "low_rank_energy": LowRank(k=2, lambda_=1.0, energy=0.9),
    "mean": Mean(),
    "mlp": MLP(k=2, widths=(12, 12), epochs=2, batch_rows=64, batch_size=4),
    "mlp_rotated": MLP(k=2, widths=(12,), epochs=2, batch_rows=64, batch_size=4, content_space=False),
    "residual": Residual(k=2, lambda_=1.0, bottleneck=8, epochs=1, inner_steps=2, batch_size=4),
    "residual_rotated": Residual(k=2, lambda_=1.0, bottleneck=8, epochs=1, inner_steps=2, batch_size=4, content_space=False),
    "residual_head_local": Residual(k=2, lambda_=1.0, closed_form="head_local", bottleneck=8, epochs=1, inner_steps=2, batch_size=4),
}
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (17, 5, 1, 11)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Geometry, torch.dtype], TinyPair]:
    made: dict[tuple[str, torch.dtype], TinyPair] = {}

    def pair(geometry: Geometry, dtype: torch.dtype) -> TinyPair:
        if (geometry.name, dtype) not in made:
            made[geometry.name, dtype] = tiny_pair(tmp_path_factory.mktemp("calibration") / "moments", geometry, dtype)
        return made[geometry.name, dtype]

    return pair


def fit(recipe: Recipe, pair: TinyPair) -> Mapper:
    models = (pair.source, pair.target)
    head_wise = isinstance(recipe, HeadLocal) or (isinstance(recipe, Residual) and recipe.closed_form == "head_local")
    if head_wise and pair.source.kv_heads != pair.target.kv_heads:
        with pytest.raises(BadInputError, match="maps head by head, but the source has 1 KV heads of 8 and the target 2 of 8; use 'ridge'"):
            recipe.fit(pair.calibration, models=models)
        pytest.skip("a head-wise mapper needs equal heads; it was refused with the reason")
    return recipe.fit(pair.calibration, models=models)


def content(pair: TinyPair, mapper: Mapper) -> ContentKV:
    rows = [[(7 * i + 3 * j) % 12 for j in range(length)] for i, length in enumerate(LENGTHS)]
    return to_content(pair.source.prefill(rows), pair.source.rope, strip=not mapper.rotated)


def map_all(mapper: Mapper, source: ContentKV, layers: int) -> list[tuple[Tensor, Tensor]]:
    return [mapper.map_layer(source, layer) for layer in range(layers)]


def test_every_built_in_recipe_is_here() -> None:
    assert {recipe.method for recipe in RECIPES.values()} == set(BUILT_IN)
    assert all(type(recipe) is recipe_class(recipe.method) for recipe in RECIPES.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
@pytest.mark.parametrize("name", RECIPES)
def test_contract(name: str, geometry: Geometry, dtype: torch.dtype, pairs: Callable[[Geometry, torch.dtype], TinyPair], tmp_path: Path) -> None:
    recipe, pair = RECIPES[name], pairs(geometry, dtype)
    mapper = fit(recipe, pair)
    source = content(pair, mapper)
    mapped = map_all(mapper, source, pair.target.layers)

    shape = (len(LENGTHS), max(LENGTHS), pair.target.kv_heads, pair.target.head_dim)
    for layer, (keys, values) in enumerate(mapped):
        for kind, tensor in (("keys", keys), ("values", values)):
            assert tuple(tensor.shape) == shape, f"{kind} of layer {layer}"
            assert tensor.device == source.values[0].device
            assert tensor.dtype == dtype
            assert bool(torch.isfinite(tensor).all()), f"{kind} of layer {layer}"

    # A row's own tokens do not depend on the rows beside it, nor on its padding.
    alone = ContentKV(
        [k[1:2, : LENGTHS[1]] for k in source.keys], [v[1:2, : LENGTHS[1]] for v in source.values], source.positions[1:2], source.lengths[1:2]
    )
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for (keys, values), layer in zip(mapped, range(pair.target.layers), strict=True):
        for whole, part in zip((keys, values), mapper.map_layer(alone, layer), strict=True):
            torch.testing.assert_close(whole[1:2, : LENGTHS[1]], part, atol=tolerance, rtol=tolerance)

    details = mapper.describe()
    json.dumps(details, allow_nan=False)
    assert details["parameters"] == mapper.parameters()
    assert details["multiply_adds_per_token"] == mapper.cost_per_token() >= mapper.parameters() > -1
    for kind in "kv":
        assert len(details[f"r2_{kind}_heldout"]) == pair.target.layers

    # Layer by layer, in any order, by a fresh mapper from disk: the same bits.
    save_mapper(mapper, tmp_path / "artifact", recipe=recipe.configuration(), calibration=pair.calibration.manifest)
    again, manifest = load_mapper(tmp_path / "artifact")
    assert type(again) is type(mapper)
    assert again.rotated == mapper.rotated
    assert manifest["recipe"] == json.loads(json.dumps(recipe.configuration()))
    assert json.loads(json.dumps(again.describe())) == json.loads(json.dumps(details))
    stored = dict(again.tensors())
    assert sorted(stored) == sorted(name for name, _ in mapper.tensors())
    for tensor_name, tensor in mapper.tensors():
        assert torch.equal(stored[tensor_name], tensor)
    for layer in reversed(range(pair.target.layers)):
        for found, expected in zip(again.map_layer(source, layer), mapped[layer], strict=True):
            assert torch.equal(found, expected)
    rebuilt = type(recipe).from_settings({k: v for k, v in manifest["recipe"].items() if k != "method"})
    assert json.loads(json.dumps(rebuilt.configuration())) == manifest["recipe"]

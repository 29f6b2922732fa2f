"""Planted truths: what a method must find, and what it must not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planted import noise, plant
from tiny_pairs import GEOMETRIES, tiny_pair
from torch import Tensor

from kvbench.mappers.closed_form import ClosedForm
from kvbench.mappers.head_local import HeadLocal
from kvbench.mappers.low_rank import LowRank
from kvbench.mappers.mlp import MLP, row_r2
from kvbench.mappers.residual import Residual
from kvbench.mappers.ridge import Ridge

WIDTH = 8


def mean_heldout(recipe: ClosedForm, folder: Path, relation: object, **settings: object) -> tuple[float, float]:
    from kvbench.calibration.moments import Calibration

    calibration = plant(folder, relation, **settings).calibration if not folder.exists() else Calibration(folder)  # type: ignore[arg-type]
    details = recipe.fit(calibration).describe()
    return tuple(sum(details[f"r2_{kind}_heldout"]) / 3 for kind in "kv")  # type: ignore[return-value]


def test_a_head_permutation_is_found_by_full_head_and_not_by_head_local(tmp_path: Path) -> None:
    """Target layer t is source layer t with its two heads swapped."""

    def swapped(x: Tensor, kind: str) -> Tensor:
        y = x.reshape(len(x), 4, 2, 4)[:, :3].flip(2).reshape(len(x), -1)
        return y + noise(y, 0.05)

    full = mean_heldout(Ridge(k=1), tmp_path / "m", swapped)
    local = mean_heldout(HeadLocal(k=1), tmp_path / "m", swapped)
    assert min(full) > 0.99
    assert max(local) < 0.1


def test_head_local_suffices_where_heads_correspond(tmp_path: Path) -> None:
    def own(x: Tensor, kind: str) -> Tensor:
        turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=x.dtype)).Q
        y = (x.reshape(len(x), 4, 2, 4)[:, :3] @ turn).reshape(len(x), -1)
        return y + noise(y, 0.05)

    assert min(mean_heldout(HeadLocal(k=1), tmp_path / "m", own)) > 0.99


@pytest.mark.parametrize("true_rank", [1, 2, 5])
def test_low_rank_finds_the_true_rank(tmp_path: Path, true_rank: int) -> None:
    def relation(x: Tensor, kind: str) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        # Orthonormal factors: every direction carries the same variance, so each one missing shows.
        left = torch.linalg.qr(torch.randn(3, WIDTH, true_rank, generator=generator, dtype=x.dtype)).Q
        right = torch.linalg.qr(torch.randn(3, WIDTH, true_rank, generator=generator, dtype=x.dtype)).Q.mT
        y = torch.cat([x[:, t * WIDTH : (t + 1) * WIDTH] @ left[t] @ right[t] for t in range(3)], dim=1)
        return y + noise(y, 1e-4)

    at = min(mean_heldout(LowRank(k=1, rank=true_rank), tmp_path / "m", relation))
    full = min(mean_heldout(Ridge(k=1), tmp_path / "m", relation))
    assert at > 0.999
    assert at >= full - 1e-4, "nothing is lost at the true rank"
    if true_rank > 1:
        assert max(mean_heldout(LowRank(k=1, rank=true_rank - 1), tmp_path / "m", relation)) < at - 0.02
    mapper = LowRank(k=1, energy=0.9999).fit(plant(tmp_path / "again", relation).calibration)
    shapes = {tensor.shape[1] for name, tensor in mapper.tensors() if name.endswith(".A")}
    assert shapes == {true_rank}, "the energy rule stops at the true rank"


def test_a_nonlinear_relation_is_found_by_mlp_and_not_by_ridge(tmp_path: Path) -> None:
    """Target coordinates are absolute values of centred source coordinates: uncorrelated with every linear function of them."""

    def relation(x: Tensor, kind: str) -> Tensor:
        return (x[:, : 3 * WIDTH] - 3.0).abs()

    planted = plant(tmp_path / "m", relation, fit_rows=3000, heldout_rows=1000)
    linear = Ridge(selection="0").fit(planted.calibration).describe()["r2_k_heldout"][0]
    fit, heldout = planted.rows["fit", "k"], planted.rows["heldout", "k"]
    recipe = MLP(widths=(48, 48), epochs=60, batch_rows=250, learning_rate=3e-3)
    x, y = fit.x[:, :WIDTH].float(), fit.y[:, :WIDTH].float()
    weights, biases = recipe.train(x, y.reshape(len(y), 2, 4), seed=0)
    trained = row_r2(heldout.x[:, :WIDTH].float(), heldout.y[:, :WIDTH].float(), weights, biases)
    assert linear < 0.05
    assert trained > 0.9


def test_training_heads_together_is_training_each_alone() -> None:
    """The batched network, given each head's initial weights, takes each head's own steps: other heads' targets do not matter."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(200, 6, generator=generator), torch.randn(200, 2, 3, generator=generator)
    recipe = MLP(widths=(8,), epochs=3, batch_rows=64)
    together, _ = recipe.train(x, y, seed=1)
    other = y.clone()
    other[:, 1] = 100 * torch.randn(200, 3, generator=generator)
    changed, _ = recipe.train(x, other, seed=1)
    for a, b in zip(together, changed, strict=True):
        torch.testing.assert_close(a[0], b[0])
        assert not torch.allclose(a[1], b[1])


def test_an_error_that_attention_sees_is_reduced_by_the_residual(tmp_path: Path) -> None:
    """A heavily shrunk ridge (lambda far above the data) leaves an error that attention reads; training removes much of it, on held-out sequences."""
    pair = tiny_pair(tmp_path / "m", GEOMETRIES[1])
    recipe = Residual(k=2, lambda_=1000.0, bottleneck=16, epochs=40, inner_steps=2, batch_size=3, learning_rate=3e-3, patience=8)
    details = recipe.fit(pair.calibration, models=(pair.source, pair.target)).describe()
    before, after = details["attention_error_closed_form"], details["attention_error"]
    assert all(a <= b for a, b in zip(after, before, strict=True)), "a layer that training does not help stays as it was"
    assert after[0] < 0.6 * before[0], "layer 0 sees the token alone, so its error can be removed"


def test_an_error_that_r2_hardly_sees_is_reduced_by_the_residual(tmp_path: Path) -> None:
    """On a well-fitted layer the residual trades R2 for attention: R2 stays within 0.01 while the attention error falls by a fifth."""
    pair = tiny_pair(tmp_path / "m", GEOMETRIES[1])
    recipe = Residual(k=2, lambda_=10.0, bottleneck=16, epochs=10, batch_size=2)
    details = recipe.fit(pair.calibration, models=(pair.source, pair.target)).describe()
    for kind in "kv":
        assert abs(details[f"r2_{kind}_heldout"][0] - details[f"r2_{kind}_heldout_closed_form"][0]) < 0.01
    assert details["attention_error"][0] < 0.8 * details["attention_error_closed_form"][0]

"""Every closed form against an independent, slow definition on the rows themselves."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from planted import Planted, Rows, dense_r2, noise, plant
from torch import Tensor

from kvbench.mappers.greedy import greedy
from kvbench.mappers.head_local import HeadLocal
from kvbench.mappers.linear import SelectedMapper
from kvbench.mappers.low_rank import LowRank
from kvbench.mappers.mean import Mean
from kvbench.mappers.ridge import Ridge

HEADS, DIM, WIDTH = 2, 4, 8
LAMBDA = 0.5


def mixed(x: Tensor, kind: str) -> Tensor:
    """A dense relation with noise: every target layer reads every source layer, nearer ones more."""
    generator = torch.Generator().manual_seed(11 + (kind == "v"))
    decay = torch.tensor([0.9 ** abs(s - t) for s in range(4) for t in range(3)], dtype=torch.float64).reshape(4, 1, 3, 1)
    weight = torch.randn(4, WIDTH, 3, WIDTH, generator=generator, dtype=torch.float64) * decay
    y = x @ weight.reshape(4 * WIDTH, 3 * WIDTH)
    return y + noise(y, 2.0) - 5.0


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return plant(tmp_path / "moments", mixed)


def dense_ridge(rows: Rows, columns: list[int], targets: list[int], penalty: float) -> tuple[Tensor, Tensor]:
    """Ridge as least squares on data augmented by sqrt(lambda) I, solved by QR: no Gram matrix, no Cholesky."""
    x, y = rows.x[:, columns], rows.y[:, targets]
    xc, yc = x - x.mean(0), y - y.mean(0)
    system = torch.cat([xc, penalty**0.5 * torch.eye(len(columns), dtype=x.dtype)])
    weight = torch.linalg.lstsq(system, torch.cat([yc, torch.zeros(len(columns), y.shape[1], dtype=y.dtype)]), driver="gels").solution
    return weight, y.mean(0) - x.mean(0) @ weight


def layer_columns(layers: tuple[int, ...]) -> list[int]:
    return [layer * WIDTH + i for layer in layers for i in range(WIDTH)]


def dense_scores(planted: Planted, part: str = "heldout") -> dict[str, Tensor]:
    out = {}
    for kind in ("k", "v"):
        fit, judged = planted.rows["fit", kind], planted.rows[part, kind]
        matrix = torch.zeros(4, 3, dtype=torch.float64)
        for s, t in itertools.product(range(4), range(3)):
            columns, targets = layer_columns((s,)), list(range(t * WIDTH, (t + 1) * WIDTH))
            weight, bias = dense_ridge(fit, columns, targets, LAMBDA)
            matrix[s, t] = dense_r2(judged.y[:, targets], judged.x[:, columns] @ weight + bias)
        out[kind] = matrix
    return out


def fitted(recipe: Ridge | HeadLocal | LowRank, planted: Planted) -> SelectedMapper:
    mapper = recipe.fit(planted.calibration)
    assert isinstance(mapper, SelectedMapper)
    return mapper


@pytest.mark.parametrize("part", ["heldout", "fit"])
def test_single_source_scores_and_top_k_follow_the_rows(planted: Planted, part: str) -> None:
    details = fitted(Ridge(k=2, lambda_=LAMBDA, select_on=part), planted).describe()
    expected = dense_scores(planted, part)
    torch.testing.assert_close(torch.tensor(details["single_source_r2_k"], dtype=torch.float64), expected["k"], atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(details["single_source_r2_v"], dtype=torch.float64), expected["v"], atol=1e-5, rtol=0)
    score = (expected["k"] + expected["v"]) / 2
    assert details["source_layers"] == [sorted(score[:, t].topk(2).indices.tolist()) for t in range(3)]


def test_ridge_is_penalised_least_squares(planted: Planted) -> None:
    mapper = fitted(Ridge(k=2, lambda_=LAMBDA), planted)
    details = mapper.describe()
    for kind, t in itertools.product("kv", range(3)):
        columns, targets = layer_columns(mapper.source_layers[t]), list(range(t * WIDTH, (t + 1) * WIDTH))
        weight, bias = dense_ridge(planted.rows["fit", kind], columns, targets, LAMBDA)
        torch.testing.assert_close(mapper.store.get(f"target.{t}.{kind}.W").double(), weight, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(mapper.store.get(f"target.{t}.{kind}.b").double(), bias, atol=2e-3, rtol=1e-4)
        for part, name in (("fit", "insample"), ("heldout", "heldout")):
            rows = planted.rows[part, kind]
            assert details[f"r2_{kind}_{name}"][t] == pytest.approx(dense_r2(rows.y[:, targets], rows.x[:, columns] @ weight + bias), abs=1e-5)


def test_relative_lambda_is_a_share_of_the_mean_diagonal(planted: Planted) -> None:
    mapper = fitted(Ridge(selection="0,2", lambda_=0.3, lambda_kind="relative"), planted)
    rows = planted.rows["fit", "k"]
    columns = layer_columns((0, 2))
    x = rows.x[:, columns]
    amount = 0.3 * float((x - x.mean(0)).square().sum(0).mean())
    weight, _ = dense_ridge(rows, columns, list(range(WIDTH)), amount)
    torch.testing.assert_close(mapper.store.get("target.0.k.W").double(), weight, atol=2e-4, rtol=1e-4)


def test_head_local_is_one_ridge_per_head(planted: Planted) -> None:
    mapper = fitted(HeadLocal(k=3, lambda_=LAMBDA), planted)
    details = mapper.describe()
    assert details["source_layers"] == fitted(Ridge(k=3, lambda_=LAMBDA), planted).describe()["source_layers"], "layers go by the full-head scores"
    for kind, t in itertools.product("kv", range(3)):
        r2 = []
        for head in range(HEADS):
            columns = [layer * WIDTH + head * DIM + i for layer in mapper.source_layers[t] for i in range(DIM)]
            targets = list(range(t * WIDTH + head * DIM, t * WIDTH + (head + 1) * DIM))
            weight, bias = dense_ridge(planted.rows["fit", kind], columns, targets, LAMBDA)
            torch.testing.assert_close(mapper.store.get(f"target.{t}.{kind}.W")[head].double(), weight, atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(mapper.store.get(f"target.{t}.{kind}.b")[head].double(), bias, atol=2e-3, rtol=1e-4)
            rows = planted.rows["heldout", kind]
            r2.append(dense_r2(rows.y[:, targets], rows.x[:, columns] @ weight + bias))
        assert details[f"r2_{kind}_heldout"][t] == pytest.approx(sum(r2) / HEADS, abs=1e-5)


def test_low_rank_is_the_best_map_of_its_rank(planted: Planted) -> None:
    """Reduced-rank ridge by its definition: truncate the fitted values of the augmented regression by SVD (Eckart and Young)."""
    rank = 3
    mapper = fitted(LowRank(k=2, lambda_=LAMBDA, rank=rank), planted)
    details = mapper.describe()
    for kind, t in itertools.product("kv", range(3)):
        columns, targets = layer_columns(mapper.source_layers[t]), list(range(t * WIDTH, (t + 1) * WIDTH))
        rows = planted.rows["fit", kind]
        weight, _ = dense_ridge(rows, columns, targets, LAMBDA)
        x = rows.x[:, columns]
        augmented = torch.cat([x - x.mean(0), LAMBDA**0.5 * torch.eye(len(columns), dtype=x.dtype)])
        right = torch.linalg.svd(augmented @ weight).Vh[:rank]
        reduced = weight @ right.T @ right
        stored = mapper.store.get(f"target.{t}.{kind}.A").double() @ mapper.store.get(f"target.{t}.{kind}.B").double()
        torch.testing.assert_close(stored, reduced, atol=5e-4, rtol=1e-4)
        bias = rows.y[:, targets].mean(0) - x.mean(0) @ reduced
        for part, name in (("fit", "insample"), ("heldout", "heldout")):
            judged = planted.rows[part, kind]
            expected = dense_r2(judged.y[:, targets], judged.x[:, columns] @ reduced + bias)
            assert details[f"r2_{kind}_{name}"][t] == pytest.approx(expected, abs=1e-5)


def test_full_rank_and_all_energy_are_ridge(planted: Planted) -> None:
    ridge = fitted(Ridge(k=2, lambda_=LAMBDA), planted)
    for recipe in (LowRank(k=2, lambda_=LAMBDA, rank=WIDTH), LowRank(k=2, lambda_=LAMBDA, energy=1.0)):
        mapper = fitted(recipe, planted)
        stored = mapper.store.get("target.1.v.A") @ mapper.store.get("target.1.v.B")
        torch.testing.assert_close(stored, ridge.store.get("target.1.v.W"), atol=1e-4, rtol=1e-4)


def test_mean_is_the_average_and_explains_nothing(planted: Planted) -> None:
    mapper = Mean().fit(planted.calibration)
    tensors = dict(mapper.tensors())
    rows = planted.rows["fit", "v"]
    torch.testing.assert_close(tensors["target.2.v.b"].double(), rows.y[:, 2 * WIDTH :].mean(0), atol=1e-4, rtol=1e-5)
    judged = planted.rows["heldout", "v"].y[:, 2 * WIDTH :]
    expected = dense_r2(judged, rows.y[:, 2 * WIDTH :].mean(0).expand_as(judged))
    assert mapper.describe()["r2_v_heldout"][2] == pytest.approx(expected, abs=1e-6)
    assert expected <= 0


@pytest.mark.parametrize("part", ["heldout", "fit"])
def test_greedy_adds_the_layer_with_the_best_joint_r2(planted: Planted, part: str) -> None:
    """Against solving every extended set from the rows."""
    for k in (1, 2, 3):
        chosen = greedy(planted.calibration, k, penalty=LAMBDA, kind="absolute", part=part)
        for t in range(3):
            targets = list(range(t * WIDTH, (t + 1) * WIDTH))
            taken: tuple[int, ...] = ()
            for _ in range(k):
                joint = {}
                for candidate in sorted(set(range(4)) - set(taken)):
                    columns = layer_columns((*taken, candidate))
                    scores = []
                    for kind in "kv":
                        weight, bias = dense_ridge(planted.rows["fit", kind], columns, targets, LAMBDA)
                        rows = planted.rows[part, kind]
                        scores.append(dense_r2(rows.y[:, targets], rows.x[:, columns] @ weight + bias))
                    joint[candidate] = sum(scores) / 2
                taken = (*taken, max(joint, key=lambda c: joint[c]))
            assert chosen[t] == tuple(sorted(taken))


def test_other_rules(planted: Planted) -> None:
    assert fitted(Ridge(selection="all"), planted).source_layers == ((0, 1, 2, 3),) * 3
    assert fitted(Ridge(k="all"), planted).source_layers == ((0, 1, 2, 3),) * 3
    assert fitted(Ridge(selection="3,1"), planted).source_layers == ((1, 3),) * 3
    assert fitted(Ridge(selection="0;1,2;3"), planted).source_layers == ((0,), (1, 2), (3,))
    # Target layers 0, 1, 2 lie at source depths 0, 1.5, 3; of layers equally near, the deeper comes first.
    assert fitted(Ridge(selection="depth", k=1), planted).source_layers == ((0,), (2,), (3,))
    assert fitted(Ridge(selection="depth", k=2), planted).source_layers == ((0, 1), (1, 2), (2, 3))
    assert fitted(Ridge(selection="greedy", k=4), planted).source_layers == ((0, 1, 2, 3),) * 3

"""Row weights of attention repair against loops over their definition, and the weighted fit against dense weighted least squares."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_pairs import GEOMETRIES, TinyPair, tiny_pair
from torch import Tensor

from kvbench.calibration.sequences import load_tokens, recorded_queries, run_pair
from kvbench.calibration.weights import attention_mass, boundaries, largest_alpha
from kvbench.mappers.attn_repair import AttentionRepair
from kvbench.mappers.head_local import HeadLocal
from kvbench.mappers.linear import SelectedMapper

GQA = GEOMETRIES[1]


def slow_mass(q: Tensor, k: Tensor, v: Tensor, positions: list[int], scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """The weights of arXiv:2609.00891, one token, head and boundary at a time."""
    batch, kv_heads, tokens, _ = k.shape
    group = q.shape[2] // kv_heads
    r_k, r_v = torch.zeros(batch, kv_heads, tokens), torch.zeros(batch, kv_heads, tokens)
    for b in range(batch):
        for h in range(kv_heads):
            for position in positions:
                first = 0 if window is None else max(0, position - window + 1)
                at_k, at_v = torch.zeros(tokens), torch.zeros(tokens)
                for u in range(h * group, (h + 1) * group):
                    query = q[b, position, u]
                    a = torch.softmax(torch.stack([scale * query @ k[b, h, i] for i in range(first, position)]), 0)
                    o = sum(a[i - first] * v[b, h, i] for i in range(first, position))
                    for i in range(first, position):
                        at_v[i] += a[i - first] ** 2
                        at_k[i] += a[i - first] ** 2 * (v[b, h, i] - o).square().sum() * query.square().sum() * scale**2
                r_k[b, h] += at_k / at_k.sum()
                r_v[b, h] += at_v / at_v.sum()
    return r_k, r_v


@pytest.mark.parametrize("window", [None, 5])
def test_mass_is_its_definition(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((2, 14, 4, 6), (2, 2, 14, 6), (2, 2, 14, 6)))
    positions, scale = [3, 8, 13], 6**-0.5
    for found, expected in zip(attention_mass(q, k, v, positions, scale, window), slow_mass(q, k, v, positions, scale, window), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.sum(-1), torch.full((2, 2), 3.0))


def test_boundaries_are_log_spaced_from_token_12() -> None:
    found = boundaries(1024, 32)
    assert (found[0], found[-1], len(found)) == (12, 1023, 32)
    ratios = [b / a for a, b in itertools.pairwise(found)]
    assert max(ratios) / min(ratios) == pytest.approx(1, abs=0.1), "equal steps of the logarithm, up to rounding to tokens"
    assert boundaries(8, 32) == [4, 5, 6, 7]
    assert boundaries(2, 32) == [1]


@given(st.lists(st.floats(0, 50), min_size=2, max_size=40).filter(lambda r: sum(r) > 1e-3), st.integers(1, 30))
def test_alpha_is_the_largest_that_keeps_enough_effective_rows(masses: list[float], features: int) -> None:
    n = len(masses)
    r = torch.tensor(masses, dtype=torch.float64)
    r = r * n / r.sum()

    def kish(alpha: float) -> float:
        w = 1 + alpha * (r - 1)
        return float(w.sum() ** 2 / w.square().sum())

    alpha = largest_alpha(n, float(r.square().sum()), features)
    needed = min(n, 2 * features)
    assert 0 <= alpha <= 1
    assert kish(alpha) >= needed * (1 - 1e-9)
    if alpha < 1:
        assert kish(min(1.0, alpha + 1e-3)) < needed


def test_queries_are_the_models_own(tmp_path: Path) -> None:
    """Attention computed from recorded queries is what the model's eager attention reports."""
    pair = tiny_pair(tmp_path / "m", GQA)
    rows = load_tokens(pair.calibration).heldout[:2]
    batch = run_pair(pair.source, pair.target, rows, queries=True)
    pair.target.model.set_attn_implementation("eager")
    with torch.no_grad():
        reported = pair.target.model(input_ids=torch.from_numpy(rows).long(), output_attentions=True).attentions
    for layer in range(pair.target.layers):
        q = batch.queries[layer].transpose(1, 2)
        k = batch.target_rotated.keys[layer].repeat_interleave(2, dim=1)
        scores = q @ k.mT * pair.target.head_dim**-0.5
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        torch.testing.assert_close(scores.masked_fill(~causal, -math.inf).softmax(-1), reported[layer], atol=1e-5, rtol=1e-4)


def test_hooks_are_gone_after_an_error(tmp_path: Path) -> None:
    pair = tiny_pair(tmp_path / "m", GQA)

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in pair.target.model.modules())

    def interrupted() -> None:
        with recorded_queries(pair.target):
            assert hooks() == before + pair.target.layers
            raise RuntimeError("stop")

    before = hooks()
    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    assert hooks() == before


def dense_rows(pair: TinyPair, mapper: SelectedMapper, target: int, kind: str, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, targets and mean-one masses of one head, row by row from a pass over everything at once."""
    stride = 2
    rows = load_tokens(pair.calibration).fit
    batch = run_pair(pair.source, pair.target, rows, queries=True)
    cached = batch.target_rotated
    mass = attention_mass(batch.queries[target], cached.keys[target], cached.values[target], boundaries(rows.shape[1], 32), 8**-0.5)
    name = "k" if kind == "k" else "v"
    r = mass[0 if kind == "k" else 1][:, head, ::stride].reshape(-1).double()
    x = torch.cat([batch.source.layer(layer, name)[:, ::stride, head].reshape(len(r), -1) for layer in mapper.source_layers[target]], dim=1)
    y = batch.target.layer(target, name)[:, ::stride, head].reshape(len(r), -1)
    return x.double(), y.double(), r * len(r) / r.sum()


@pytest.mark.parametrize("k", [1, 3])
def test_weighted_fit_is_weighted_least_squares(tmp_path: Path, k: int) -> None:
    pair = tiny_pair(tmp_path / "m", GQA)
    penalty = 0.7
    mapper = AttentionRepair(k=k, lambda_=penalty, batch_size=2).fit(pair.calibration, models=(pair.source, pair.target))
    plain = HeadLocal(k=k, lambda_=penalty).fit(pair.calibration)
    assert isinstance(mapper, SelectedMapper)
    details = mapper.describe()
    assert details["source_layers"] == plain.describe()["source_layers"]
    for target, kind, head in ((0, "k", 0), (3, "v", 1), (4, "k", 1)):
        x, y, r = dense_rows(pair, mapper, target, kind, head)
        alpha = largest_alpha(len(r), float(r.square().sum()), x.shape[1])
        assert details[f"alpha_{kind}"][target][head] == pytest.approx(alpha, abs=1e-3)
        w = (1 + alpha * (r - 1))[:, None]
        assert details[f"effective_rows_{kind}"][target][head] == pytest.approx(float(w.sum() ** 2 / w.square().sum()), rel=1e-3)
        assert details[f"effective_rows_{kind}"][target][head] >= min(len(r), 2 * x.shape[1]) - 0.1
        xc, yc = x - (w * x).sum(0) / w.sum(), y - (w * y).sum(0) / w.sum()
        weight = torch.linalg.solve((w * xc).T @ xc + penalty * torch.eye(x.shape[1], dtype=x.dtype), (w * xc).T @ yc)
        torch.testing.assert_close(mapper.store.get(f"target.{target}.{kind}.W")[head].double(), weight, atol=2e-3, rtol=2e-3)
        bias = (w * y).sum(0) / w.sum() - (w * x).sum(0) / w.sum() @ weight
        torch.testing.assert_close(mapper.store.get(f"target.{target}.{kind}.b")[head].double(), bias, atol=2e-3, rtol=2e-3)

"""Every figure of `diagnose` against a slow definition that shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_pairs import GEOMETRIES, tiny_pair

from kvbench.diagnostics.concentration import attention_weights, k_concentration, v_concentration
from kvbench.diagnostics.diagnose import DiagnoseSettings, diagnose
from kvbench.diagnostics.reconstruction import token_classes
from kvbench.errors import BadInputError
from kvbench.mappers.controls import control
from kvbench.mappers.ridge import Ridge

PREFIX, SUFFIX = 24, 12


@pytest.fixture(scope="module", params=[g for g in GEOMETRIES if g.name in ("mha", "gqa")], ids=lambda g: g.name)
def pair(request, tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("pair") / "moments", request.param)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(5).integers(0, 12, (12, PREFIX + SUFFIX)).astype(np.int32)


def rotate(x, positions, theta, inverse=False):
    """Rotate-half RoPE written out pair by pair; `x` [tokens, dim]."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    angle = -angle if inverse else angle
    a, b = x[:, :half].double(), x[:, half:].double()
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Slow:
    """One sequence, one mapper, loops over layers and heads; transformers' own DynamicCache answers."""

    def __init__(self, source, target, mapper, row):
        from transformers import DynamicCache

        self.target, model = target, target.model
        self.theta = target.config.rope_parameters["rope_theta"]
        self.m, n = PREFIX - 1, len(row)
        ids = torch.tensor([row.tolist()])
        captured = {}
        handles = [
            block.self_attn.q_proj.register_forward_hook(lambda _m, _a, out, i=i: captured.__setitem__(i, out[0]))
            for i, block in enumerate(target.blocks)
        ]
        own = DynamicCache()
        with torch.no_grad():
            self.native_logits = model(input_ids=ids, cache=own).logits[0].double()
        for handle in handles:
            handle.remove()
        self.heads, self.kv, self.dim = target.config.num_attention_heads, target.kv_heads, target.head_dim
        position = torch.arange(n)
        self.q = [
            [rotate(captured[layer].view(n, self.heads, self.dim)[:, h], position, self.theta) for h in range(self.heads)]
            for layer in range(target.layers)
        ]
        self.k = [own.layers[layer].keys[0].double() for layer in range(target.layers)]
        self.v = [own.layers[layer].values[0].double() for layer in range(target.layers)]
        self.mapped = self._map(source, mapper, row)
        self.row, self.ids, self.n = row, ids, n

    def _map(self, source, mapper, row):
        from kvbench.kv.capture import to_content

        content = to_content(source.prefill([row[: self.m].tolist()]), source.rope)
        out = []
        for layer in range(self.target.layers):
            keys, values = mapper.map_layer(content, layer)
            out.append(
                (
                    [rotate(keys[0, :, h], torch.arange(self.m), self.theta) for h in range(self.kv)],
                    [values[0, :, h].double() for h in range(self.kv)],
                )
            )
        return out

    def mixed(self, layer, head):
        """Keys and values of a KV head: mapped prefix, native rest."""
        keys, values = self.mapped[layer]
        return torch.cat([keys[head], self.k[layer][head][self.m :]]), torch.cat([values[head], self.v[layer][head][self.m :]])

    def attend(self, layer, h, keys, values, position):
        weights = (self.q[layer][h][position] @ keys[: position + 1].T * self.dim**-0.5).softmax(-1)
        return weights @ values[: position + 1], weights

    def native_cosine(self, layer):
        found = []
        for h in range(self.heads):
            g = h // (self.heads // self.kv)
            for position in range(PREFIX, self.n):
                own, _ = self.attend(layer, h, self.k[layer][g], self.v[layer][g], position)
                other, _ = self.attend(layer, h, *self.mixed(layer, g), position)
                found.append(torch.nn.functional.cosine_similarity(own, other, dim=0))
        return float(torch.stack(found).mean())

    def k_concentration(self, layer, h):
        g = h // (self.heads // self.kv)
        error = self.mapped[layer][0][g] - self.k[layer][g][: self.m]
        _, s, vt = torch.linalg.svd(self.q[layer][h][PREFIX:], full_matrices=False)
        components = (error @ vt.T).square().mean(0)
        full = error.square().sum(1).mean() / self.dim
        return float((s.square() * components).sum() / s.square().sum() / full)

    def v_concentration(self, layer, h):
        g = h // (self.heads // self.kv)
        error = (self.mapped[layer][1][g] - self.v[layer][g][: self.m]).square().sum(1)
        read = torch.zeros(self.m, dtype=torch.float64)
        for position in range(PREFIX, self.n):
            _, weights = self.attend(layer, h, self.k[layer][g], self.v[layer][g], position)
            read += weights[: self.m].square()
        return float((read * error).sum() / read.sum() / error.mean())

    def cache(self):
        from transformers import DynamicCache

        parts = [(torch.stack(keys)[None].float(), torch.stack(values)[None].float()) for keys, values in self.mapped]
        return DynamicCache(ddp_cache_data=parts)

    def logits(self):
        """Of positions PREFIX-1 .. n-2, behind the mapped prefix."""
        with torch.no_grad():
            out = self.target.model(input_ids=self.ids[:, self.m :], position_ids=torch.arange(self.m, self.n)[None], cache=self.cache())
        return out.logits[0, :-1].double()

    def greedy(self, steps, mapped):
        from transformers import DynamicCache

        cache = self.cache() if mapped else DynamicCache()
        said, ids, at = [], self.ids[:, self.m : PREFIX] if mapped else self.ids[:, :PREFIX], self.m if mapped else 0
        with torch.no_grad():
            for _ in range(steps):
                position = torch.arange(at, at + ids.shape[1])[None]
                ids, at = (
                    self.target.model(input_ids=ids, position_ids=position, cache=cache).logits[:, -1].argmax(-1, keepdim=True),
                    at + ids.shape[1],
                )
                said.append(int(ids))
        return said


@pytest.fixture(scope="module")
def found(pair, tokens):
    mapper = Ridge(k=2).fit(pair.calibration)
    settings = DiagnoseSettings((PREFIX,), SUFFIX, batch_size=5, greedy_tokens=6)
    return mapper, diagnose(pair.source, pair.target, {"ridge": mapper}, tokens, settings, fitted=["ridge"])


def test_cosines_concentrations_and_agreement_by_hand(pair, tokens, found):
    mapper, diagnostics = found
    entry = diagnostics.entry("ridge")
    assert entry is not None
    slow = [Slow(pair.source, pair.target, mapper, row) for row in tokens]
    layers = range(pair.target.layers)
    cosines = [np.mean([s.native_cosine(layer) for s in slow]) for layer in layers]
    assert entry.cosine_native == pytest.approx(cosines, abs=1e-5)
    assert diagnostics.figure("ridge", "attention_cosine_native").value == pytest.approx(np.mean(cosines), abs=1e-5)
    assert diagnostics.figure("ridge", "attention_cosine_native_worst_layer").value == pytest.approx(min(cosines), abs=1e-5)
    heads = range(pair.target.config.num_attention_heads)
    for name, method in (("k_concentration", Slow.k_concentration), ("v_concentration", Slow.v_concentration)):
        wanted = np.mean([[method(s, layer, h) for layer in layers for h in heads] for s in slow])
        assert diagnostics.figure("ridge", name).value == pytest.approx(wanted, rel=2e-3)
    kl, top1, top5, nll, equal, run = [], [], [], [], [], []
    for s in slow:
        p, q = (x.log_softmax(-1) for x in (s.native_logits[PREFIX - 1 : -1], s.logits()))
        kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
        top1.append(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
        top5.append(np.mean([len(set(a.topk(5).indices.tolist()) & set(b.topk(5).indices.tolist())) / 5 for a, b in zip(p, q, strict=True)]))
        truth = torch.tensor(s.row[PREFIX:].tolist())
        nll.append(float((p - q)[torch.arange(SUFFIX), truth].mean()))
        ours, theirs = s.greedy(6, True), s.greedy(6, False)
        equal.append(np.mean([a == b for a, b in zip(ours, theirs, strict=True)]))
        run.append(next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), 6))
    for name, values in (("kl_nats", kl), ("top1_agreement", top1), ("top5_overlap", top5), ("nll_difference", nll)):
        assert diagnostics.figure("ridge", name).value == pytest.approx(np.mean(values), abs=1e-4), name
    assert diagnostics.figure("ridge", "greedy_agreement").value == pytest.approx(np.mean(equal))
    assert diagnostics.figure("ridge", "greedy_identical_tokens").value == pytest.approx(np.mean(run))


def test_reconstruction_by_hand(pair, tokens, found):
    mapper, diagnostics = found
    slow = [Slow(pair.source, pair.target, mapper, row) for row in tokens]
    for kind, name in ((0, "keys_rotated"), (1, "values")):
        r2, error, cosine = [], [], []
        for layer in range(pair.target.layers):
            for h in range(pair.target.kv_heads):
                own = torch.cat([(s.k, s.v)[kind][layer][h][: s.m] for s in slow])
                new = torch.cat([s.mapped[layer][kind][h] for s in slow])
                rss, tss = (own - new).square().sum(0), (own - own.mean(0)).square().sum(0)
                r2.append(float((1 - rss / tss).mean()))
                cosine.append(float(torch.nn.functional.cosine_similarity(own, new, dim=-1).mean()))
                error.append(float((rss.sum() / own.square().sum()).sqrt()))
        assert diagnostics.figure("ridge", f"r2_{name}").value == pytest.approx(np.mean(r2), abs=1e-4)
        assert diagnostics.figure("ridge", f"cosine_{name}").value == pytest.approx(np.mean(cosine), abs=1e-5)
        entry = diagnostics.entry("ridge")
        profile = next(p for p in entry.layers if p.name == f"relative_error_{name}")
        assert [v for row in profile.heads for v in row] == pytest.approx(error, abs=1e-4)


def test_the_target_on_its_own_prefix_changes_nothing(pair, tokens):
    oracle = control("oracle", target_layers=pair.target.layers, kv_heads=pair.target.kv_heads, head_dim=pair.target.head_dim)
    settings = DiagnoseSettings((PREFIX,), SUFFIX, greedy_tokens=8)
    found = diagnose(pair.source, pair.target, {"oracle": oracle}, tokens, settings, source_baseline=False)
    # Values are copied bit by bit; keys are un-rotated and rotated again in float32, one part in a million.
    for name in ("attention_cosine_native", "attention_cosine_propagated", "cosine_keys", "cosine_values", "r2_values"):
        assert found.figure("oracle", name).value == pytest.approx(1, abs=1e-6), name
    for name in ("relative_error_keys", "kl_nats", "nll_difference", "relative_error_values"):
        assert found.figure("oracle", name).value == pytest.approx(0, abs=1e-5), name
    for name in ("top1_agreement", "greedy_agreement", "top5_overlap"):
        assert found.figure("oracle", name).value == 1, name
    assert found.figure("oracle", "v_concentration").value is None
    assert "no error" in found.figure("oracle", "v_concentration").reason


def test_the_source_baseline_is_the_source_models_own_answer(pair, tokens, found):
    _, diagnostics = found
    kl, top1 = [], []
    for row in tokens:
        ids = torch.tensor([row.tolist()])
        with torch.no_grad():
            p, q = (m.model(input_ids=ids).logits[0, PREFIX - 1 : -1].double().log_softmax(-1) for m in (pair.target, pair.source))
        kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
        top1.append(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert diagnostics.figure("source", "kl_nats").value == pytest.approx(np.mean(kl), rel=1e-4)
    assert diagnostics.figure("source", "top1_agreement").value == pytest.approx(np.mean(top1))
    assert diagnostics.figure("source", "r2_keys") is None


def test_concentration_is_above_one_where_attention_reads():
    generator = torch.Generator().manual_seed(0)
    queries = torch.zeros(1, 6, 2, 4)
    queries[..., 0] = torch.randn(1, 6, 2, generator=generator)
    along, across = torch.zeros(1, 5, 1, 4), torch.zeros(1, 5, 1, 4)
    along[..., 0], across[..., 1] = 1, 1
    # All error in the one direction out of four that is read, or in one that is not.
    assert k_concentration(along, queries)[0].tolist() == pytest.approx([4, 4])
    assert k_concentration(across, queries)[0].tolist() == pytest.approx([0, 0])
    weights = torch.zeros(1, 1, 1, 1, 5)
    weights[..., 2] = 1
    there, elsewhere = torch.zeros(1, 5, 1, 4), torch.zeros(1, 5, 1, 4)
    there[:, 2], elsewhere[:, 3] = 1, 1
    assert v_concentration(there, weights).item() == pytest.approx(5)
    assert v_concentration(elsewhere, weights).item() == pytest.approx(0)


def test_attention_weights_heed_the_window():
    q = torch.ones(1, 6, 1, 2)
    weights = attention_weights(q, q, torch.tensor([4, 5]), 1.0, 2)[0, 0, 0]
    assert weights.flatten().tolist() == pytest.approx([0, 0, 0, 0.5, 0.5, 0, 0, 0, 0, 0, 0.5, 0.5])


def test_classes_of_tokens():
    tokens = np.array([[1, 1, 1, 1, 2, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
    mass = np.ones((1, 16))
    mass[0, 7] = 100
    assert token_classes(tokens, mass)[0].tolist() == [0, 0, 0, 0, 2, 3, 2, 1, *[3] * 8]


@pytest.mark.parametrize(
    ("settings", "names", "message"),
    [
        (DiagnoseSettings((1,), 4), ["zero"], "at least 2 tokens"),
        (DiagnoseSettings((250,), 40), ["zero"], "exceed the 256 positions"),
        (DiagnoseSettings((30,), 40), ["zero"], "give more text"),
        (DiagnoseSettings((20,), 4), [], "no mapper"),
        (DiagnoseSettings((20,), 4), ["source"], "may not be called 'source'"),
        (DiagnoseSettings((20,), 4, batch_size=0), ["zero"], "must be positive"),
    ],
)
def test_refusals(pair, tokens, settings, names, message):
    zero = control("zero", target_layers=pair.target.layers, kv_heads=pair.target.kv_heads, head_dim=pair.target.head_dim)
    with pytest.raises(BadInputError, match=message):
        diagnose(pair.source, pair.target, dict.fromkeys(names, zero), tokens, settings)

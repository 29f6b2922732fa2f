"""Maps of other tools: in, applied, out again, and refused with one message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import foreign_directories as made
import pytest
import torch
from foreign_directories import CHOSEN, DIM, HEADS, SOURCE_LAYERS
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbench.errors import ArtifactError, BadInputError
from kvbench.kv.content import ContentKV
from kvbench.mappers.artifact import caveats, load_mapper, save_mapper
from kvbench.mappers.foreign import Imported, ImportedMapper, export_mapper, import_mapper
from kvbench.mappers.foreign_veloxquant import join_heads, stack_heads
from kvbench.mappers.head_local import HeadLocalMapper
from kvbench.mappers.linear import LinearMapper, MemoryStore
from kvbench.mappers.recipes import load_recipe
from kvbench.pairs.locate import load_config, load_tokenizer, resolve
from kvbench.pairs.tokenizers import config_fingerprint, tokenizer_fingerprint
from kvbench.scoring.arms import mapper_arm
from kvbench.scoring.run import arm_spec

EMBEDDED = {"source": ("embedded:source", None), "target": ("embedded:target", None)}
EMBEDDED_SHAPE = (2, 32)


def _content(heads: int = HEADS, dim: int = DIM, layers: int = SOURCE_LAYERS) -> ContentKV:
    generator = torch.Generator().manual_seed(3)
    keys, values = ([torch.randn(1, 2, heads, dim, generator=generator) for _ in range(layers)] for _ in range(2))
    return ContentKV(keys, values, torch.arange(2).expand(1, -1), torch.tensor([2]))


def _slow(layer_inputs: list[Tensor], layers: list[int], weight, bias, heads: int, dim: int) -> Tensor:
    """Every entry of the output by itself: over source layers as listed, then KV heads, then dimensions. `weight(row, head, d)`."""
    out = torch.zeros(1, 2, heads, dim)
    source_heads, source_dim = layer_inputs[0].shape[2:]
    for t in range(2):
        for h in range(heads):
            for d in range(dim):
                total = float(bias(h, d))
                for j, layer in enumerate(layers):
                    for g in range(source_heads):
                        for e in range(source_dim):
                            total += float(layer_inputs[layer][0, t, g, e]) * float(weight(j * source_heads * source_dim + g * source_dim + e, h, d))
                out[0, t, h, d] = total
    return out


def test_head_stacking_index_by_index():
    weight = torch.arange(5 * 6, dtype=torch.float32).reshape(5, 6)
    stacked = stack_heads(weight, 2)
    assert stacked.shape == (2, 5, 3)
    for h in range(2):
        for i in range(5):
            for d in range(3):
                assert stacked[h, i, d] == weight[i, h * 3 + d]
    assert torch.equal(join_heads(stacked), weight)


def test_veloxquant_maps_as_its_definition_says(tmp_path):
    tensors = made.veloxquant(tmp_path / "vq", torch.float32)
    manifest = import_mapper(tmp_path / "vq", tmp_path / "out", "veloxquant")
    mapper, stored = load_mapper(tmp_path / "out")
    assert stored == manifest.model_dump()
    source = _content()
    for i, layers in enumerate(CHOSEN):
        for kind, found, inputs in zip("kv", mapper.map_layer(source, i), (source.keys, source.values), strict=True):
            w, b = tensors[f"{i}.w_{kind}"], tensors[f"{i}.b_{kind}"]
            wanted = _slow(inputs, layers, lambda row, h, d, w=w: w[h, row, d], lambda h, d, b=b: b[h, d], HEADS, DIM)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_router_maps_as_its_definition_says(tmp_path):
    tensors = made.router(tmp_path / "router")
    import_mapper(tmp_path / "router", tmp_path / "out", "router")
    mapper, manifest = load_mapper(tmp_path / "out")
    source = _content()
    for i, layers in enumerate(CHOSEN):
        for kind, found, inputs in zip("kv", mapper.map_layer(source, i), (source.keys, source.values), strict=True):
            w, b = tensors[f"target.{i}.{kind}.W"], tensors[f"target.{i}.{kind}.b"]
            wanted = _slow(inputs, layers, lambda row, h, d, w=w: w[row, h * DIM + d], lambda h, d, b=b: b[h * DIM + d], HEADS, DIM)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert manifest["source"]["revision"] == "a" * 40
    assert manifest["source"]["dtype"] == "bfloat16"
    assert manifest["calibration"]["fingerprint"] == "c" * 64
    assert set(manifest["source"]["unknown"]) >= {"config_fingerprint", "weights_fingerprint", "tokenizer_fingerprint", "rope", "layers"}
    assert "revision" not in manifest["source"]["unknown"]


@pytest.mark.parametrize("variant", ["ridge", "rank2_iso"])
def test_kvxfer_keys_and_values_read_their_own_layers(tmp_path, variant):
    stored = made.kvxfer(tmp_path / "maps", (EMBEDDED_SHAPE, EMBEDDED_SHAPE), 6)
    import_mapper(tmp_path / "maps", tmp_path / "out", "kvxfer", models=EMBEDDED, variant=variant)
    mapper, manifest = load_mapper(tmp_path / "out")
    assert isinstance(mapper, ImportedMapper)
    source = _content(*EMBEDDED_SHAPE)
    for i in (0, 4):
        for word, found, inputs in zip(("keys", "values"), mapper.map_layer(source, i), (source.keys, source.values), strict=True):
            state = stored[f"{variant}__{word}"][i]
            whole = state["weight"] if state["factors"] is None else state["factors"][0] @ state["factors"][1]
            design = torch.cat([inputs[layer].reshape(2, -1) for layer in state["source_layers"]], 1)
            wanted = (design @ whole + state["bias"]).reshape(found.shape)
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    tensors = load_file(tmp_path / "out" / "weights.safetensors")
    matrices = [tensor for name, tensor in tensors.items() if not name.endswith(".b")]
    assert mapper.parameters() == manifest["fit"]["parameters"] == sum(tensor.numel() for tensor in matrices)
    assert manifest["calibration"]["rows"] == 1234
    assert manifest["fit"].get("r2_k_heldout") == ([0.25] * 6 if variant == "ridge" else None)
    assert manifest["recipe"]["variant"] == variant


def test_kvxfer_between_unequal_widths_is_experimental(tmp_path, tiny):
    for name, kwargs in (("source", {"layers": 4, "kv_heads": 1}), ("target", {"layers": 3, "kv_heads": 2, "head_dim": 16})):
        model = tiny(**kwargs)
        model.model.config.save_pretrained(tmp_path / name)
        model.tokenizer.save_pretrained(tmp_path / name)
    made.kvxfer(tmp_path / "maps", ((1, 8), (2, 16)), 3)
    models = {role: (str(tmp_path / role), None) for role in ("source", "target")}
    manifest = import_mapper(tmp_path / "maps", tmp_path / "out", "kvxfer", models=models, variant="ridge")
    assert manifest.experimental
    assert "1 x 8 -> 2 x 16" in caveats(manifest.model_dump())["experimental"]
    with pytest.raises(BadInputError, match=r"values of .* read other source layers than its keys"):
        export_mapper(tmp_path / "out", tmp_path / "back", "router")


def _artifact(tmp_path: Path, dtype: str = "float32") -> dict[str, Tensor]:
    """A ridge artifact of the embedded pair's shapes."""
    generator = torch.Generator().manual_seed(0)
    heads, dim = EMBEDDED_SHAPE
    lists = [[3, 1], [0, 2], [1, 0], [2, 3], [3, 0], [1, 2]]
    tensors = {}
    for i in range(len(lists)):
        for kind in "kv":
            tensors[f"target.{i}.{kind}.W"] = torch.randn(2 * heads * dim, heads * dim, generator=generator)
            tensors[f"target.{i}.{kind}.b"] = torch.randn(heads * dim, generator=generator)
    pins = {}
    for role, layers in (("source", 4), ("target", 6)):
        geometry = {"layers": layers, "kv_heads": heads, "head_dim": dim, "query_heads": 4}
        rope = {"type": "default", "theta": 10000.0, "rotary_dim": dim, "interleaved": False}
        pins[role] = {"name": f"embedded:{role}", "revision": None, "dtype": "float32", "geometry": geometry, "rope": rope}
    mapper = LinearMapper(lists, heads * dim, heads, dim, MemoryStore(tensors), {"r2_k_insample": [0.5] * 6})
    data = {"name": "text", "fingerprint": "f" * 64, "sequences": 20, "seq_len": 128, "stride": 1, "rows": 2560, "seed": 0}
    recipe = load_recipe("ridge", ["k=2"]).configuration()
    save_mapper(mapper, tmp_path / "ridge", recipe=recipe, calibration={**pins, "data": data}, dtype=dtype)
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("named", [True, False], ids=["models named", "models unknown"])
@pytest.mark.parametrize("kind", ["veloxquant", "router"])
def test_out_and_in_again_changes_no_bit(tmp_path, kind, named):
    tensors = _artifact(tmp_path)
    export_mapper(tmp_path / "ridge", tmp_path / "foreign", kind)
    manifest = import_mapper(tmp_path / "foreign", tmp_path / "again", kind, models=EMBEDDED if named else None)
    again = load_file(tmp_path / "again" / "weights.safetensors")
    assert again.keys() == tensors.keys()
    assert all(again[name].dtype == torch.float32 and torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert manifest.fit["source_layers"] == [[3, 1], [0, 2], [1, 0], [2, 3], [3, 0], [1, 2]]
    assert manifest.recipe["k"] == 2
    assert manifest.recipe["lambda_"] == 0.01
    assert manifest.calibration["sequences"] == 20
    assert not manifest.experimental


@pytest.mark.parametrize(("kind", "weights"), [("veloxquant", "mapper.safetensors"), ("router", "weights.safetensors")])
def test_in_and_out_again_changes_no_bit(tmp_path, kind, weights):
    tensors = getattr(made, kind)(tmp_path / "foreign")
    import_mapper(tmp_path / "foreign", tmp_path / "artifact", kind)
    export_mapper(tmp_path / "artifact", tmp_path / "back", kind)
    back = load_file(tmp_path / "back" / weights)
    assert back.keys() == tensors.keys()
    assert all(back[name].dtype == tensor.dtype and torch.equal(back[name], tensor) for name, tensor in tensors.items())
    first, second = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("foreign", "back"))
    if kind == "router":
        same = ("compatibility", "topk", "ridge_alpha", "rope_stripped_on_keys", "source_layers_per_target", "schema_version")
        assert {key: first["calibration"][key] for key in first["calibration"]}.items() <= second["calibration"].items()
    else:
        same = ("config", "format_version")
        assert [entry["source_layers"] for entry in second["layers"]] == CHOSEN
        assert [second[role]["n_layers"] for role in ("source", "target")] == [4, 3]
        assert second["target"]["rope_theta"] == 1000000.0
    assert {key: first[key] for key in same} == {key: second[key] for key in same}


def test_narrower_export_is_exact_for_its_dtype(tmp_path):
    tensors = _artifact(tmp_path)
    export_mapper(tmp_path / "ridge", tmp_path / "foreign", "veloxquant", dtype="float16")
    manifest = import_mapper(tmp_path / "foreign", tmp_path / "again", "veloxquant")
    assert manifest.weights_dtype == "float16"
    again = load_file(tmp_path / "again" / "weights.safetensors")
    assert all(torch.equal(again[name], tensor.half()) for name, tensor in tensors.items())


def test_pins_come_from_the_models_named(tmp_path):
    _artifact(tmp_path)
    export_mapper(tmp_path / "ridge", tmp_path / "foreign", "veloxquant")
    manifest = import_mapper(tmp_path / "foreign", tmp_path / "again", "veloxquant", models=EMBEDDED)
    ref = resolve("embedded:source")
    assert manifest.source["config_fingerprint"] == config_fingerprint(load_config(ref))
    assert manifest.source["tokenizer_fingerprint"] == tokenizer_fingerprint(load_tokenizer(ref))
    assert manifest.source["unknown"] == ["revision", "weights_fingerprint", "dtype", "attention_backend"]
    half = import_mapper(tmp_path / "foreign", tmp_path / "half", "veloxquant", models={"target": EMBEDDED["target"]})
    assert half.source["name"] == "unknown"
    assert {"name", "tokenizer_fingerprint", "query heads"} <= set(half.source["unknown"])
    assert "source tokenizer_fingerprint" in caveats(half.model_dump())["unknown"]
    assert "target tokenizer_fingerprint" not in caveats(half.model_dump())["unknown"]


def test_a_named_model_that_contradicts_the_map_is_refused(tmp_path):
    made.veloxquant(tmp_path / "vq")
    with pytest.raises(BadInputError, match=r"fitted for a target with layers 3, but 'embedded:target' has 6"):
        import_mapper(tmp_path / "vq", tmp_path / "out", "veloxquant", models={"target": EMBEDDED["target"]})
    assert not (tmp_path / "out").exists()


def test_an_arm_checks_what_can_be_checked_and_records_what_cannot(tmp_path, tiny):
    made.veloxquant(tmp_path / "vq", torch.float32)
    import_mapper(tmp_path / "vq", tmp_path / "out", "veloxquant")
    shape = {"kv_heads": HEADS, "head_dim": 4, "heads": 2}
    with pytest.raises(ArtifactError, match="fitted for a source with head dim 3, but 'tiny-llama-4-0' has 4"):
        mapper_arm(str(tmp_path / "out"), tiny(layers=4, **shape), tiny(layers=3, **shape))
    made.kvxfer(tmp_path / "maps", ((HEADS, 4), (HEADS, 4)), 3)
    source, target = tiny(layers=4, seed=1, **shape), tiny(layers=3, seed=2, **shape)
    for model, name in ((source, "s"), (target, "t")):
        model.model.config.save_pretrained(tmp_path / name)
        model.tokenizer.save_pretrained(tmp_path / name)
    models = {"source": (str(tmp_path / "s"), None), "target": (str(tmp_path / "t"), None)}
    import_mapper(tmp_path / "maps", tmp_path / "kvxfer", "kvxfer", models=models, variant="ridge")
    arm = mapper_arm(str(tmp_path / "kvxfer"), source, target)
    pinned = arm_spec(arm, "kvxfer").pin
    assert pinned["imported from"] == "kvxfer"
    assert pinned["calibration"] == "unknown"
    assert "source weights_fingerprint" in str(pinned["unknown"])
    assert "calibration seed" in str(pinned["unknown"])
    with pytest.raises(ArtifactError, match="with configuration"):
        mapper_arm(str(tmp_path / "kvxfer"), source, tiny(layers=5, seed=2, **shape))


def test_an_arm_compares_the_rope_base_that_a_format_states(tmp_path, tiny):
    _artifact(tmp_path)
    export_mapper(tmp_path / "ridge", tmp_path / "foreign", "veloxquant")
    import_mapper(tmp_path / "foreign", tmp_path / "again", "veloxquant")
    shape = {"kv_heads": 2, "head_dim": 32}
    source, target = tiny(layers=4, seed=1, **shape), tiny(layers=6, seed=2, **shape)
    assert mapper_arm(str(tmp_path / "again"), source, target).manifest is not None
    other = tiny(layers=6, seed=2, rope={"rope_type": "default", "rope_theta": 5000.0}, **shape)
    with pytest.raises(ArtifactError, match=r"a target with RoPE base 10000\.0, but 'tiny-llama-6-2' has 5000\.0"):
        mapper_arm(str(tmp_path / "again"), source, other)
    with pytest.raises(ArtifactError, match=r"a target with layers 6, but 'tiny-llama-5-2' has 5"):
        mapper_arm(str(tmp_path / "again"), source, tiny(layers=5, seed=2, **shape))


def test_a_router_map_that_reads_too_deep_is_refused_when_applied(tmp_path, tiny):
    made.router(tmp_path / "router")
    manifest = json.loads((tmp_path / "router" / "manifest.json").read_text())
    manifest["compatibility"]["head_dim"] = 4
    layers = {str(i): [5, 0] for i in range(3)}
    manifest["source_layers_per_target"] = {"k": layers, "v": layers}
    tensors = {}
    for i in range(3):
        for kind in "kv":
            tensors[f"target.{i}.{kind}.W"], tensors[f"target.{i}.{kind}.b"] = torch.zeros(16, 8), torch.zeros(8)
    save_file(tensors, str(tmp_path / "router" / "weights.safetensors"))
    (tmp_path / "router" / "manifest.json").write_text(json.dumps(manifest))
    made.seal(tmp_path / "router")
    import_mapper(tmp_path / "router", tmp_path / "out", "router")
    shape = {"kv_heads": 2, "head_dim": 4, "heads": 2}
    with pytest.raises(ArtifactError, match="reads source layer 5, but 'tiny-llama-4-0' has layers 0 to 3"):
        mapper_arm(str(tmp_path / "out"), tiny(layers=4, **shape), tiny(layers=3, **shape))


def test_an_imported_map_is_not_fitted():
    recipe = load_recipe("kvbench.mappers.foreign:Imported")
    assert isinstance(recipe, Imported)
    with pytest.raises(BadInputError, match="cannot be fitted"):
        recipe.fit(None)  # type: ignore[arg-type]


def _edit(path: Path, change) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def _tensors(path: Path, name: str, change) -> None:
    tensors = load_file(path / name)
    change(tensors)
    save_file(tensors, str(path / name))


VQ, ROUTER = "mapper.safetensors", "weights.safetensors"
DAMAGE = [
    ("veloxquant", lambda p: _tensors(p, VQ, lambda t: t.update({"1.w_v": torch.zeros(2, 11, 3)})), r"'1.w_v' is \[2, 11, 3\], but .*makes it"),
    ("veloxquant", lambda p: _tensors(p, VQ, lambda t: t.pop("2.b_k")), "lacks tensor '2.b_k', expected as"),
    ("veloxquant", lambda p: _tensors(p, VQ, lambda t: t.update({"9.w_k": torch.zeros(1)})), "does not account for, first '9.w_k'"),
    ("veloxquant", lambda p: _tensors(p, VQ, lambda t: t["0.b_k"].fill_(float("nan"))), "'0.b_k' holds entries that are not finite"),
    ("veloxquant", lambda p: _edit(p, lambda m: m["layers"].pop(1)), "no entry in 'layers' for target layer 1"),
    ("veloxquant", lambda p: _edit(p, lambda m: m["layers"][1].update(target_layer=7)), "for target layer 1"),
    (
        "veloxquant",
        lambda p: _edit(p, lambda m: m["layers"][0].update(source_layers=[4, 0])),
        "reads source layer 4, but the source has layers 0 to 3",
    ),
    ("veloxquant", lambda p: _edit(p, lambda m: m["layers"][0].update(source_layers=[1, 1])), "names a source layer twice"),
    ("veloxquant", lambda p: _edit(p, lambda m: m["layers"][0].update(source_layers=[1])), "reads 1 source layers, but config.k is 2"),
    ("veloxquant", lambda p: _edit(p, lambda m: m["layers"][0].update(source_layers="0,1")), "not a list of layer numbers"),
    ("veloxquant", lambda p: _edit(p, lambda m: m.update(format_version=2)), "format_version 2"),
    ("veloxquant", lambda p: _edit(p, lambda m: m["source"].update(rope_scaling={"factor": 8})), "source.rope_scaling"),
    ("veloxquant", lambda p: _edit(p, lambda m: m["source"].update(n_kv_heads=0)), "'source.n_kv_heads' is 0"),
    ("veloxquant", lambda p: _edit(p, lambda m: m["target"].pop("head_dim")), "lacks 'target.head_dim'"),
    ("veloxquant", lambda p: (p / VQ).write_bytes(b"x" * 40), "cannot be read as safetensors"),
    ("veloxquant", lambda p: (p / VQ).unlink(), "has no mapper.safetensors"),
    ("veloxquant", lambda p: (p / "manifest.json").write_text("{"), "is damaged"),
    ("veloxquant", lambda p: (p / "manifest.json").write_text("[]"), "not a JSON object"),
    ("router", lambda p: _edit(p, lambda m: m.update(topk=3)), "was changed after it was written"),
    (
        "router",
        lambda p: (_edit(p, lambda m: m["compatibility"].update(variant="per_head")), made.seal(p)),
        "per_head', whose tensor layout is not published",
    ),
    ("router", lambda p: (_edit(p, lambda m: m["compatibility"].update(head_order="reversed")), made.seal(p)), "head_order is 'reversed'"),
    ("router", lambda p: (_edit(p, lambda m: m["compatibility"].update(target_tp=2)), made.seal(p)), "target_tp is 2"),
    ("router", lambda p: (_edit(p, lambda m: m["source_layers_per_target"]["v"].pop("1")), made.seal(p)), "target layer 1"),
    ("router", lambda p: (_edit(p, lambda m: m["source_layers_per_target"].pop("v")), made.seal(p)), "source_layers_per_target.v"),
    ("router", lambda p: (_tensors(p, ROUTER, lambda t: t.update({"target.0.k.W": torch.zeros(8, 8)})), made.seal(p)), r"'target.0.k.W' is \[8, 8\]"),
    ("router", lambda p: (p / "SHA256SUMS").unlink(), "has no SHA256SUMS"),
]


@pytest.mark.parametrize(("kind", "damage", "message"), DAMAGE, ids=[f"{kind}-{i}" for i, (kind, _, _) in enumerate(DAMAGE)])
def test_bad_directories_are_refused_and_leave_nothing(tmp_path, kind, damage, message):
    getattr(made, kind)(tmp_path / "foreign")
    damage(tmp_path / "foreign")
    with pytest.raises((ArtifactError, BadInputError), match=message) as caught:
        import_mapper(tmp_path / "foreign", tmp_path / "out", kind)
    assert caught.value.exit_code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["foreign"]


def _states(path: Path, name: str, change) -> None:
    stored = torch.load(path / name, weights_only=True)
    change(stored)
    torch.save(stored, path / name)


KVXFER_DAMAGE = [
    (
        lambda p: _states(p, "ridge__keys.pt", lambda s: s[2].update(weight=torch.zeros(100, 64))),
        "ridge",
        r"'2.weight' is \[100, 64\], but .* makes it \[128, 64\]",
    ),
    (lambda p: _states(p, "ridge__values.pt", lambda s: s.pop(3)), "ridge", "no map for target layer 3"),
    (
        lambda p: _states(p, "ridge__values.pt", lambda s: s[0].update(source_layers=[9])),
        "ridge",
        "reads source layer 9, but the source has layers 0 to 3",
    ),
    (lambda p: _states(p, "rank2_iso__keys.pt", lambda s: s[1].update(factors=None)), "rank2_iso", "neither a weight nor two factors"),
    (lambda p: torch.save({0: {"weight": Path("x")}}, p / "ridge__keys.pt"), "ridge", "cannot be read as tensors and plain values"),
    (lambda p: torch.save([1, 2], p / "ridge__keys.pt"), "ridge", "is not a map per target layer"),
    (lambda p: (p / "ridge__keys.pt").unlink(), "ridge", "has no ridge__keys.pt; expected maps.json"),
    (lambda p: (p / "maps.json").unlink(), "ridge", "holds rank2_iso__keys.pt, .*; expected maps.json"),
    (lambda p: None, "whitened", "--variant whitened is not among them"),
    (lambda p: None, None, "holds the maps rank2_iso, ridge; choose one with --variant"),
]


@pytest.mark.parametrize(("damage", "variant", "message"), KVXFER_DAMAGE, ids=range(len(KVXFER_DAMAGE)))
def test_bad_kvxfer_maps_are_refused(tmp_path, damage, variant, message):
    made.kvxfer(tmp_path / "maps", (EMBEDDED_SHAPE, EMBEDDED_SHAPE), 6)
    damage(tmp_path / "maps")
    with pytest.raises((ArtifactError, BadInputError), match=message):
        import_mapper(tmp_path / "maps", tmp_path / "out", "kvxfer", models=EMBEDDED, variant=variant)
    assert not (tmp_path / "out").exists()


def test_kvxfer_needs_the_models_named(tmp_path):
    made.kvxfer(tmp_path / "maps", (EMBEDDED_SHAPE, EMBEDDED_SHAPE), 6)
    with pytest.raises(BadInputError, match="name them: --source some/small --target some/large"):
        import_mapper(tmp_path / "maps", tmp_path / "out", "kvxfer", variant="ridge")


def test_arguments_that_cannot_be_meant(tmp_path):
    made.router(tmp_path / "router")
    (tmp_path / "taken").mkdir()
    _artifact(tmp_path)
    for call, message in (
        (lambda: import_mapper(tmp_path / "router", tmp_path / "out", "mlx"), "format 'mlx' is unknown"),
        (lambda: import_mapper(tmp_path / "absent", tmp_path / "out", "router"), "is not a directory"),
        (lambda: import_mapper(tmp_path / "router", tmp_path / "taken", "router"), "exists already"),
        (lambda: import_mapper(tmp_path / "router", tmp_path / "out", "router", variant="ridge"), "holds one map"),
        (lambda: import_mapper(tmp_path / "ridge", tmp_path / "out", "router"), "is a kvbench artifact already"),
        (lambda: export_mapper(tmp_path / "ridge", tmp_path / "out", "kvxfer"), "does not write format 'kvxfer'"),
        (lambda: export_mapper(tmp_path / "ridge", tmp_path / "out", "router", dtype="int8"), "dtype 'int8' is unknown"),
        (lambda: export_mapper(tmp_path / "ridge", tmp_path / "taken", "router"), "exists already"),
    ):
        with pytest.raises(BadInputError, match=message):
            call()
    assert not (tmp_path / "out").exists()


def test_maps_that_a_format_cannot_hold_are_refused(tmp_path):
    _artifact(tmp_path)
    _, manifest = load_mapper(tmp_path / "ridge")
    calibration = {"source": manifest["source"], "target": manifest["target"], "data": manifest["calibration"]}
    heads, dim = EMBEDDED_SHAPE
    local = HeadLocalMapper([[0]], heads * dim, heads, dim, MemoryStore({"target.0.k.W": torch.zeros(heads, dim, dim)}))
    save_mapper(local, tmp_path / "local", recipe=load_recipe("head_local").configuration(), calibration=calibration)
    with pytest.raises(BadInputError, match="is a head_local map; the router format holds full-head linear maps"):
        export_mapper(tmp_path / "local", tmp_path / "out", "router")
    uneven = LinearMapper([[0], [1, 2]], heads * dim, heads, dim, MemoryStore({}))
    save_mapper(uneven, tmp_path / "uneven", recipe=manifest["recipe"], calibration=calibration)
    with pytest.raises(BadInputError, match="read 1 to 2 source layers"):
        export_mapper(tmp_path / "uneven", tmp_path / "out", "veloxquant")
    large = LinearMapper([[0]], heads * dim, heads, dim, MemoryStore({"target.0.k.W": torch.full((heads * dim, heads * dim), 1e6)}))
    save_mapper(large, tmp_path / "large", recipe=manifest["recipe"], calibration=calibration)
    with pytest.raises(BadInputError, match=r"reaches 1e\+06, beyond float16"):
        export_mapper(tmp_path / "large", tmp_path / "out", "veloxquant", dtype="float16")
    scaled = {**manifest["source"], "rope": {**manifest["source"]["rope"], "type": "llama3"}}
    save_mapper(large, tmp_path / "scaled", recipe=manifest["recipe"], calibration={**calibration, "source": scaled})
    with pytest.raises(BadInputError, match="knows only the default RoPE"):
        export_mapper(tmp_path / "scaled", tmp_path / "out", "veloxquant")
    wide = {**manifest["source"], "geometry": {**manifest["source"]["geometry"], "kv_heads": 1}}
    save_mapper(large, tmp_path / "wide", recipe=manifest["recipe"], calibration={**calibration, "source": wide})
    for kind in ("router", "veloxquant"):
        with pytest.raises(BadInputError, match=r"\(1, 32\) to \(2, 32\)"):
            export_mapper(tmp_path / "wide", tmp_path / "out", kind)
    made.router(tmp_path / "router")
    import_mapper(tmp_path / "router", tmp_path / "imported", "router")
    with pytest.raises(BadInputError, match="import it again with --source NAME"):
        export_mapper(tmp_path / "imported", tmp_path / "out", "veloxquant")
    shutil.rmtree(tmp_path / "imported")
    assert not (tmp_path / "out").exists()

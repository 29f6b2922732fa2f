"""The training script: seeded, and removing layers leaves the others as they were."""

from __future__ import annotations

import pytest
import torch

from kvbench.embedded.tokenizer import build_tokenizer
from kvbench.embedded.train import Schedule, Shape, new_model, rows, train, without_layers

SHAPE = Shape(layers=3, width=16)


def test_rows_start_at_a_document_and_have_one_length() -> None:
    tokenizer = build_tokenizer(1024)
    seen: set[int] = set()
    for batch, _ in zip(rows(tokenizer, Schedule(seed=5, steps=0, learning_rate=0.0)), range(12), strict=False):
        seen.add(batch.shape[1])
        assert batch.numel() == 4096
        first = tokenizer.convert_ids_to_tokens(batch[:, 0].tolist())
        # documents start with a capital or, sums only, with a number; few words within a document do
        assert all(token == tokenizer.bos_token or token[1].isupper() or token[1].isdigit() for token in first)
    assert seen == {128, 512}


def test_same_seed_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = build_tokenizer(1024)
    models = []
    for _ in range(2):
        model = new_model(SHAPE, 4, tokenizer)
        train(model, tokenizer, Schedule(seed=4, steps=2, learning_rate=1e-3), "twin")
        models.append(model)
    untrained = new_model(SHAPE, 4, tokenizer)
    for once, twice, before in zip(models[0].parameters(), models[1].parameters(), untrained.parameters(), strict=True):
        torch.testing.assert_close(once, twice, rtol=0.0, atol=1e-6)  # thread order may round differently
        assert not torch.equal(once, before)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "twin: step 2/2" in captured.err


def test_removed_layers_are_gone_and_the_others_unchanged() -> None:
    model = new_model(SHAPE, 4, build_tokenizer(1024))
    smaller = without_layers(model, (1,))
    assert smaller.config.num_hidden_layers == len(smaller.model.layers) == 2
    assert [layer.self_attn.layer_idx for layer in smaller.model.layers] == [0, 1]
    for mine, theirs in ((0, 0), (1, 2)):
        expected = model.model.layers[theirs].state_dict()
        for name, tensor in smaller.model.layers[mine].state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    assert torch.equal(smaller.lm_head.weight, model.lm_head.weight)

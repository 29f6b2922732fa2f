"""Make the embedded models: `python -m kvbench.embedded.train --out DIR`.

All three members, seeded. README.md beside this file has the minutes, the scores and how the shipped models came about.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvbench.embedded.corpus import document_stream
from kvbench.embedded.tokenizer import build_tokenizer

MAX_LENGTH = 1024
KV_HEADS = 2
HEAD_DIM = 32
TOKENS_PER_STEP = 4096
SHORT_ROW, LONG_ROW, LONG_SHARE = 128, 512, 0.15
REMOVED_LAYERS: tuple[int, ...] = (2, 4)


@dataclass(frozen=True)
class Schedule:
    """How a model is trained.

    Attributes:
        seed: Of the initial weights and of the document stream.
        steps: Optimiser steps of 4,096 tokens.
        learning_rate: At its peak; warm-up over the first 5 %, then a cosine down to zero.
    """

    seed: int
    steps: int
    learning_rate: float


@dataclass(frozen=True)
class Shape:
    """What may differ between the members: depth and width."""

    layers: int
    width: int


TARGET = (Shape(layers=6, width=128), Schedule(seed=1, steps=2000, learning_rate=2e-3))
STRANGER = (Shape(layers=4, width=96), Schedule(seed=2, steps=2200, learning_rate=3e-3))
HEALING = Schedule(seed=3, steps=20, learning_rate=1e-4)


def new_model(shape: Shape, seed: int, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of the family's KV geometry with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=3 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=2 * KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def rows(tokenizer: PreTrainedTokenizerFast, schedule: Schedule) -> Iterator[torch.Tensor]:
    """Batches `[rows, tokens]` of packed documents, each row from the start of a document, some behind `<s>`."""
    rng = random.Random(schedule.seed)
    stream = document_stream(schedule.seed)
    while True:
        length = LONG_ROW if rng.random() < LONG_SHARE else SHORT_ROW
        batch: list[list[int]] = []
        while len(batch) < TOKENS_PER_STEP // length:
            row = [cast(int, tokenizer.bos_token_id)] if rng.random() < 0.3 else []
            while len(row) < length:
                row += [*tokenizer.encode(next(stream)), cast(int, tokenizer.eos_token_id)]
            batch.append(row[:length])
        yield torch.tensor(batch)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, schedule: Schedule, name: str) -> None:
    """Next-token training in place; progress goes to stderr."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=schedule.learning_rate, betas=(0.9, 0.98)
    )
    warm_up = max(1, schedule.steps // 20)
    model.train()
    began = time.monotonic()
    for step, batch in zip(range(schedule.steps), rows(tokenizer, schedule), strict=False):
        share = min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * max(0, step - warm_up) / max(1, schedule.steps - warm_up))))
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * share
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == schedule.steps - 1:
            minutes = (time.monotonic() - began) / 60
            print(f"{name}: step {step + 1}/{schedule.steps}, {loss.item():.3f} nats/token, {minutes:.1f} min", file=sys.stderr, flush=True)
    model.eval()


def without_layers(model: LlamaForCausalLM, removed: tuple[int, ...]) -> LlamaForCausalLM:
    """A copy of the model that lacks the given layers, the others renumbered."""
    kept = [layer for layer in range(model.config.num_hidden_layers) if layer not in removed]
    config = LlamaConfig.from_dict({**model.config.to_dict(), "num_hidden_layers": len(kept)})
    smaller = LlamaForCausalLM(config)
    weights = {}
    for key, tensor in model.state_dict().items():
        parts = key.split(".")
        if parts[:2] == ["model", "layers"]:
            if int(parts[2]) in removed:
                continue
            parts[2] = str(kept.index(int(parts[2])))
        weights[".".join(parts)] = tensor.clone()
    smaller.load_state_dict(weights)
    return smaller


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a member with its tokenizer: weights in bf16, to be loaded as float32 (`dtype=auto`), in which the figures are exact."""
    model.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors makes its files private, and an installed package is read by others
    model.float()
    print(f"wrote {folder}", file=sys.stderr, flush=True)


def main() -> None:
    """Train the members that are asked for, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write source/, target/ and stranger/ into")
    parser.add_argument(
        "--only", choices=("siblings", "source", "stranger"), help="train a part: target and source, source from a target in --out, stranger"
    )
    parser.add_argument("--threads", type=int, default=2, help="fewer are faster where others compute too (default: 2)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = build_tokenizer(MAX_LENGTH)
    out: Path = arguments.out

    if arguments.only in (None, "siblings"):
        shape, schedule = TARGET
        target = new_model(shape, schedule.seed, tokenizer)
        train(target, tokenizer, schedule, "target")
        save(target, tokenizer, out / "target")
    if arguments.only != "stranger":
        source = without_layers(LlamaForCausalLM.from_pretrained(out / "target", dtype=torch.float32), REMOVED_LAYERS)
        train(source, tokenizer, HEALING, "source")
        save(source, tokenizer, out / "source")
    if arguments.only in (None, "stranger"):
        shape, schedule = STRANGER
        stranger = new_model(shape, schedule.seed, tokenizer)
        train(stranger, tokenizer, schedule, "stranger")
        save(stranger, tokenizer, out / "stranger")


if __name__ == "__main__":
    main()

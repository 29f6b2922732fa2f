"""Pins of models that nobody loaded: from configurations and tokenizers, from what a foreign format says, and a list of what is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.errors import BadInputError
from kvbench.mappers.foreign_layout import Side
from kvbench.pairs.geometry import geometry_of
from kvbench.pairs.locate import load_config, load_tokenizer, resolve
from kvbench.pairs.tokenizers import config_fingerprint, tokenizer_fingerprint

PINNED = ("revision", "config_fingerprint", "weights_fingerprint", "tokenizer_fingerprint", "dtype", "attention_backend", "rope")


def model_pin(name: str, revision: str | None = None, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """What configuration and tokenizer of a model at hand pin; weights, dtype and attention backend stay None.

    Raises:
        BadInputError: the model cannot be found or read.
    """
    ref = resolve(name, revision)
    config = load_config(ref, trust_remote_code=trust_remote_code)
    geometry = geometry_of(config)
    return {
        "name": ref.name,
        "revision": ref.revision or getattr(config, "_commit_hash", None),
        "config_fingerprint": config_fingerprint(config),
        "weights_fingerprint": None,
        "tokenizer_fingerprint": tokenizer_fingerprint(load_tokenizer(ref, trust_remote_code=trust_remote_code)),
        "dtype": None,
        "attention_backend": None,
        "geometry": {"layers": geometry.layers, "kv_heads": geometry.kv_heads, "head_dim": geometry.head_dim, "query_heads": geometry.query_heads},
        "rope": geometry.rope.to_dict(),
        "model_type": geometry.model_type,
    }


def side_of(pin: Mapping[str, Any]) -> Side:
    """A pinned model as a format would describe it."""
    geometry = pin["geometry"]
    return Side(pin["name"], pin["revision"], geometry["layers"], geometry["kv_heads"], geometry["head_dim"], pin["rope"]["theta"])


def stated_pin(role: str, said: Side, pinned: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """Join what a format says of a model with the model the user names for it.

    Args:
        role: `source` or `target`.
        said: the format's statements.
        pinned: `model_pin` of the model at hand, if one was named.
        where: the foreign directory, for the message.

    Returns:
        A pin; what nobody knows is None and listed under `unknown`.

    Raises:
        BadInputError: the two contradict each other.
    """
    if pinned is None:
        geometry = {"layers": said.layers, "kv_heads": said.kv_heads, "head_dim": said.head_dim, "query_heads": None}
        rope = None if said.rope_theta is None else {"type": "default", "theta": said.rope_theta}
        empty = dict.fromkeys(PINNED)
        return geometry_unknown(
            {**empty, "name": said.name or "unknown", "revision": said.revision, "dtype": said.dtype, "geometry": geometry, "rope": rope}
        )
    at_hand = side_of(pinned)
    for label, stated, found in (
        ("layers", said.layers, at_hand.layers),
        ("KV heads", said.kv_heads, at_hand.kv_heads),
        ("head width", said.head_dim, at_hand.head_dim),
        ("RoPE base", said.rope_theta, at_hand.rope_theta),
        ("revision", said.revision, at_hand.revision),
    ):
        if stated is not None and found is not None and stated != found:
            raise BadInputError(
                f"'{where}' was fitted for a {role} with {label} {stated}, but '{at_hand.name}' has {found}; name the model it was fitted for"
            )
    joined = {**pinned, "revision": pinned["revision"] or said.revision, "dtype": said.dtype, "stated_name": said.name, "named_at_import": True}
    return geometry_unknown(joined)


def geometry_unknown(pin: dict[str, Any]) -> dict[str, Any]:
    """The pin with its list of what is unknown brought up to date."""
    unknown = [name for name in PINNED if pin.get(name) is None]
    unknown += [name.replace("_", " ") for name, value in sorted(pin["geometry"].items()) if value is None]
    unknown += ["name"] if pin["name"] == "unknown" else []
    return {**pin, "unknown": unknown}

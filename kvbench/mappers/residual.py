"""A trained residual on a frozen closed form: a zero-initialised GELU bottleneck per target layer, trained on the attention-output error.

Source: kvxfer's neural variant (ridge plus a bottleneck of 256): the only one of its variants that lowered perplexity. It starts as the closed
form itself and keeps, per target layer, the weights with the smallest held-out error, so a layer that training cannot help stays closed-form.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvbench.calibration.moments import Calibration
from kvbench.errors import BadInputError
from kvbench.kv.content import ContentKV, Kind
from kvbench.mappers.base import Mapper, Progress, TensorStore
from kvbench.mappers.closed_form import ClosedForm, Selecting, defined
from kvbench.mappers.head_local import HeadLocal
from kvbench.mappers.linear import MemoryStore, SelectedMapper, design_matrix
from kvbench.mappers.ridge import Ridge
from kvbench.mappers.training import KINDS, identity_of, workplace

if TYPE_CHECKING:
    from kvbench.pairs.models import LoadedModel

CLOSED_FORMS: dict[str, type[ClosedForm]] = {"ridge": Ridge, "head_local": HeadLocal}


class ResidualMapper(SelectedMapper):
    """The closed form's tensors, and `target.{layer}.{k|v}.U1` `[features, bottleneck]`, `.u1`, `.U2` `[bottleneck, target width]`, `.u2`."""

    name = "residual"

    def __init__(
        self,
        source_layers: Sequence[Sequence[int]],
        source_width: int,
        kv_heads: int,
        head_dim: int,
        store: TensorStore,
        details: Mapping[str, Any] | None = None,
        *,
        rotated: bool = False,
    ) -> None:
        super().__init__(source_layers, source_width, kv_heads, head_dim, store, details, rotated=rotated)
        frozen = CLOSED_FORMS[self.details["closed_form"]].mapper_class
        self.frozen = frozen(source_layers, source_width, kv_heads, head_dim, store, rotated=rotated)

    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """Closed form plus residual."""
        keys, values = self.frozen.map_layer(source, target_layer)
        return keys + self._residual(source, target_layer, "k"), values + self._residual(source, target_layer, "v")

    def _residual(self, source: ContentKV, target_layer: int, kind: Kind) -> Tensor:
        design = design_matrix(source, self.source_layers[target_layer], kind)
        parts = [self.weights.get(f"target.{target_layer}.{kind}.{name}", design.dtype, design.device) for name in ("U1", "u1", "U2", "u2")]
        return bottleneck(design, *parts).reshape(source.batch, source.tokens, self.kv_heads, self.head_dim)


def bottleneck(rows: Tensor, into: Tensor, into_bias: Tensor, out: Tensor, out_bias: Tensor) -> Tensor:
    """`gelu(rows U1 + u1) U2 + u2`."""
    return torch.addmm(out_bias, torch.nn.functional.gelu(torch.addmm(into_bias, rows, into)), out)


@dataclass(frozen=True)
class Residual(Selecting):
    """Closed form plus trained residual; see `Selecting` for the other settings.

    Attributes:
        closed_form: what is frozen beneath, `ridge` or `head_local`.
        bottleneck: hidden units per target layer and kind.
        epochs: passes over the sequences.
        inner_steps: optimiser steps per forward pass of the two models, each with its own split and queries.
        queries: query positions per step.
        learning_rate: peak of the one-cycle schedule of AdamW.
        weight_decay: of AdamW.
        evaluations: held-out evaluations, evenly spread over the steps.
        patience: stop after so many evaluations in which no target layer improved.
        seed: of initial weights, order, splits and queries.
        batch_size: sequences per forward pass.
    """

    method: ClassVar[str] = "residual"
    mapper_class: ClassVar[type[SelectedMapper]] = ResidualMapper
    needs_models: ClassVar[bool] = True

    closed_form: str = "ridge"
    bottleneck: int = 256
    epochs: int = 2
    inner_steps: int = 4
    queries: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    evaluations: int = 8
    patience: int = 3
    seed: int = 0
    batch_size: int = 8

    def check(self, calibration: Calibration) -> None:
        """Also refuse settings that cannot be."""
        super().check(calibration)
        if self.closed_form not in CLOSED_FORMS:
            raise BadInputError(f"closed_form = '{self.closed_form}'; it is one of {', '.join(CLOSED_FORMS)}")
        names = ("bottleneck", "epochs", "inner_steps", "queries", "evaluations", "patience", "batch_size")
        wrong = [f"{name} = {getattr(self, name)}" for name in names if getattr(self, name) < 1]
        if wrong or not self.learning_rate > 0 or self.weight_decay < 0:
            what = ", ".join(wrong) or f"learning_rate = {self.learning_rate}, weight_decay = {self.weight_decay}"
            raise BadInputError(f"recipe 'residual' has {what}; counts and learning_rate must be positive, weight_decay zero or more")

    def frozen_recipe(self) -> ClosedForm:
        """The recipe of what lies beneath."""
        names = ("k", "lambda_", "lambda_kind", "selection", "select_on", "content_space")
        return CLOSED_FORMS[self.closed_form](**{name: getattr(self, name) for name in names})

    def fit(
        self,
        calibration: Calibration,
        *,
        models: tuple[LoadedModel, LoadedModel] | None = None,
        progress: Progress | None = None,
        checkpoint: Path | None = None,
    ) -> Mapper:
        """Fit the closed form, then train what it leaves; state after each evaluation is kept in `checkpoint`."""
        from kvbench.mappers.residual_training import Trainer

        started = time.perf_counter()
        self.check(calibration)
        frozen = self.frozen_recipe().fit(calibration)
        assert isinstance(frozen, SelectedMapper)
        with workplace(checkpoint, identity_of(self.configuration(), calibration)) as folder:
            trainer = Trainer(self, calibration, frozen, models, folder)
            trained = trainer.run(progress)
        tensors = dict(frozen.tensors()) | trained.tensors
        details = {
            **frozen.details,
            "closed_form": self.closed_form,
            **{f"r2_{kind}_heldout_closed_form": frozen.details[f"r2_{kind}_heldout"] for kind in KINDS},
            **{f"r2_{kind}_heldout": defined(trained.r2_heldout[kind]) for kind in KINDS},
            "attention_error_closed_form": trained.error_before,
            "attention_error": trained.error_after,
            "steps": trained.steps,
            "seconds": round(time.perf_counter() - started, 3),
        }
        for kind in KINDS:  # in-sample R2 would be of the closed form alone
            del details[f"r2_{kind}_insample"]
        return ResidualMapper(
            frozen.source_layers,
            calibration.source_width,
            calibration.kv_heads,
            calibration.head_dim,
            MemoryStore(tensors),
            details,
            rotated=not self.content_space,
        )

"""The records that training passes around.

Axes: B rows, T positions of a sequence. This module stays outside jaxtyping's hook.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core import LanguageModel, LMOutput, Params, record, static_field
from specjax.models import HeadVocabulary
from specjax.ops import locate


class HeadedModel(LanguageModel, Protocol):
    """A LanguageModel whose head can be called alone, and whose layers can be read."""

    def apply(
        self,
        params: Params,
        tokens: Array,
        cache: Any = None,
        *,
        positions: Array | None = None,
        mask: Array | None = None,
        features: tuple[str, ...] = (),
    ) -> tuple[LMOutput, Any]:
        """See `LanguageModel.apply`; `features` are wanted in `LMOutput.features`."""
        ...

    @property
    def head(self) -> HeadVocabulary | None:
        """The ids that a reduced head has rows for; None: all."""
        ...

    def unembed(self, params: Params, hidden: Array, *, reduced: bool = False) -> Array:
        """Logits `[*B, V]` of `LMOutput.hidden [*B, D]`.

        With `reduced` those `[*B, W]` of a reduced head's own ids; of a full one all V.
        """
        ...

    def feature_names(self) -> tuple[str, ...]:
        """What `features` may name; "layers.0", "layers.1", ... are the blocks."""
        ...


@record
class Policy:
    """A model with its parameters, as one argument of pure functions."""

    params: Params
    model: HeadedModel = static_field()


@record
class Models:
    """Who takes part in a step. Only the student gets gradients."""

    student: Policy
    teacher: Policy | None = None
    reference: Policy | None = None  # a draft to compare with (AdaSPEC)


@record
class Behaviour:
    """With which probabilities a rollout's tokens were drawn, in nats.

    Tokens that were not drawn have 0 in both.
    """

    log_prob: Array  # [B, T] under the law that they were drawn from
    log_q: Array  # [B, T] under the student as it was then


@record
class Batch:
    """Sequences to train on, padded on the right.

    Padding is known by `mask`, never by an id: a pad id that equals the end of text
    does not take the end of text out of the loss.

    `mask[b, i]` says that token i is to be predicted (from the tokens before it) and
    counts in the loss. Column 0 never does: nothing predicts it.
    """

    tokens: Array  # [B, T] int32
    mask: Array  # [B, T] bool
    prompt_length: Array  # [B] int32, where a rollout takes over
    on_policy: Array  # [B] bool, rows that the student wrote: never labels
    behaviour: Behaviour | None = None  # of rollouts whose objective asks for it
    cached: Any = None  # the teacher's law from disk, see `TeacherCache`
    # [B, T] bool, tokens that the student's head has a row for; None: all of them.
    writable: Array | None = None
    # The most tokens that `mask` has in any row, known when a program is compiled: no
    # logits are made for the others. None: not known, so as many as predict something.
    loss_width: int | None = static_field(default=None)

    def for_head(self, head: HeadVocabulary | None) -> "Batch":
        """The same batch, which knows what a student with this head can write."""
        if head is None:
            return self
        return dataclasses.replace(self, writable=locate(self.tokens, head.ids)[1])

    def bounded(self) -> "Batch":
        """The same batch, on the host, which knows its `loss_width`.

        Rows that are taken from it (a corpus) know the corpus's: all have one shape.
        """
        most = int(np.sum(np.asarray(self.mask), axis=1).max(initial=1))
        return dataclasses.replace(self, loss_width=max(most, 1))

    @classmethod
    def of(
        cls, tokens: Any, *, length: Any = None, prompt_length: Any = None, mask=None
    ) -> "Batch":
        """A batch of given sequences, on the host.

        Args:
            tokens: `[B, T]` ids, anything behind each row's length.
            length: `[B]` tokens a row, default T.
            prompt_length: `[B]`, default 1: whole sequences count.
            mask: `[B, T]` tokens that count; default those in
                `prompt_length <= i < length`. Give it for chats (spans of the
                assistant), or where a rollout's prompt is part of the loss.

        Raises:
            ValueError: shapes that do not fit, or lengths out of range.
        """
        tokens = np.asarray(tokens, np.int32)
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, T], got shape {tokens.shape}")
        batch, width = tokens.shape
        length = _rows("length", width if length is None else length, batch, 0, width)
        prompt = 1 if prompt_length is None else prompt_length
        prompt = _rows("prompt_length", prompt, batch, 0, width)
        index = np.arange(width)[None, :]
        if mask is None:
            mask = index >= prompt[:, None]
        mask = np.asarray(mask, bool)
        if mask.shape != tokens.shape:
            raise ValueError(
                f"mask must have the shape of tokens, {tokens.shape}, got {mask.shape}"
            )
        mask = mask & (index < length[:, None]) & (index > 0)
        prompt = np.minimum(prompt, length)
        return cls(tokens, mask, prompt, np.zeros((batch,), bool))  # pyright: ignore


def _rows(name: str, value: Any, batch: int, low: int, high: int) -> np.ndarray:
    value = np.broadcast_to(np.asarray(value, np.int32), (batch,))
    if value.size and (value.min() < low or value.max() > high):
        raise ValueError(
            f"{name} must be {low}..{high}, got {value.min()}..{value.max()}"
        )
    return value


@record
class Sums:
    """What a step counted. Sums only, so that steps, micro-batches and devices add.

    Ratios are taken at the very end (`as_dict`): a mean of means would weigh a token by
    how many share its micro-batch. Every term of the objective has a count of its own:
    the loss is the sum over terms of `parts / counts`.
    """

    parts: dict[str, Array]  # of each term, weighted, the sum over its loss tokens
    counts: dict[str, Array]  # of each term, its loss tokens
    tokens: Array  # loss tokens of any term
    agreement: Array  # loss tokens whose arg max is the target's (or the label)
    overlap: Array  # the sum of sum_v min(p, q): expected accepted drafts
    outside: Array  # the sum of p's mass on ids that the student's head lacks
    on_policy_tokens: Array  # loss tokens in rows that the student wrote
    rows: Array
    empty_rows: Array  # rows without a loss token: they count nothing
    updates: Array  # optimiser steps taken
    skipped: Array  # steps without any loss token: parameters unchanged
    grad_norm: Array  # the sum over updates
    # What a trained drafter counts, see `core.TrainableDrafter.loss`.
    named: dict[str, Array] = dataclasses.field(default_factory=dict)

    @classmethod
    def zeros(cls, terms: Sequence[str] = ()) -> "Sums":
        """Nothing counted."""
        number, real = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        kinds: dict[str, Any] = dict.fromkeys(_REALS, real)
        kinds["parts"] = dict.fromkeys(terms, real)
        kinds["counts"] = dict.fromkeys(terms, number)
        kinds["named"] = {}
        return cls(**{f.name: kinds.get(f.name, number) for f in _fields(cls)})

    def __add__(self, other: "Sums") -> "Sums":
        """The counts of both."""
        return jax.tree.map(lambda a, b: a + b, self, other)

    @property
    def mean_loss(self) -> Array:
        """Nats a loss token; 0 where there is none."""
        means = [
            part / jnp.maximum(self.counts[name], 1)
            for name, part in self.parts.items()
        ]
        return sum(means, jnp.zeros(()))

    def as_dict(self) -> dict[str, float | int]:
        """The ratios and the counts, for JSON."""
        sums = {
            f.name: np.asarray(getattr(self, f.name)).item()
            for f in _fields(self)
            if f.name not in ("parts", "counts", "named")
        }
        tokens, updates = max(sums["tokens"], 1), max(sums["updates"], 1)
        means = {
            f"loss/{name}": float(part) / max(int(self.counts[name]), 1)
            for name, part in self.parts.items()
        }
        ratios = {name: sums[name] / tokens for name in ("agreement", "overlap")}
        ratios |= {"outside": sums["outside"] / tokens} if sums["outside"] else {}
        ratios = _means(self.named) or ratios  # a drafter says what there is to see
        # A term may count only some of the tokens: how many is part of the news.
        own = {f"tokens/{name}": int(count) for name, count in self.counts.items()}
        own = {name: count for name, count in own.items() if count != sums["tokens"]}
        counts = ("tokens", "on_policy_tokens", "rows", "empty_rows", "skipped")
        return {
            "loss": sum(means.values()),
            **(means if len(means) > 1 else {}),
            **ratios,
            "grad_norm": sums["grad_norm"] / updates,
            **{name: sums[name] for name in counts},
            **own,
        }


def _means(named: dict[str, Array]) -> dict[str, float]:
    """What a drafter summed, over what it says that it summed."""
    sums = {name: np.asarray(value).item() for name, value in named.items()}
    means = {}
    for name, value in sums.items():
        kind, _, part = name.partition("/")
        if kind != "tokens":
            means[name] = value / max(sums.get(f"tokens/{part}", sums["tokens"]), 1)
    return means


_REALS = ("agreement", "overlap", "outside", "grad_norm")


def _fields(record_or_class) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(record_or_class)


@record
class TrainState:
    """All that a step changes, and all that a checkpoint has to hold.

    `key` is the run's own and never changes: step n draws from `fold_in(key, n)`, so a
    resumed run draws what the straight one drew.
    """

    params: Params  # float32 masters
    opt_state: Any
    step: Array  # [] int32, steps done
    key: Array  # [] a typed key
    aux: Params = ()  # what the objective learns: projections between widths
    memory: Any = ()  # what the source keeps: a replay buffer

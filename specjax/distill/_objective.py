"""What a step minimises: a weighted sum of terms, made a few positions at a time.

Axes: B rows, T positions, C positions of a chunk, D width, V vocabulary.

Logits at position t predict token t + 1. The logits of teacher and student are the
largest arrays of a distillation step (`[B, T, V]`, twice, and their gradients), so they
are made chunk by chunk from the hidden states and made again for the gradient.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import LMOutput, Params
from specjax.distill._response import at_labels, log_law, on_head
from specjax.distill._state import Batch, HeadedModel, Models, Policy, Sums
from specjax.distill._term import Term, TokenView, registry
from specjax.models import HeadVocabulary
from specjax.ops import chunk_size, map_chunks, sum_chunks

Scales = tuple[Array, ...]  # of each term: weight / loss tokens


@dataclass(frozen=True, init=False)
class Objective:
    """`sum_i weight_i * (loss of term i) / (its loss tokens)`. Frozen and hashable.

    Attributes:
        terms: `(weight, term)` pairs.
        chunk: tokens whose logits are alive at once; None: all.
        monitor: count agreement and overlap too (a few more passes over the logits).
            Agreement is with the target's arg max, or with the label where there is no
            teacher; `overlap` is sum min(p, q), the acceptance of drafts at T=1, or the
            probability of the label. `outside` is the target's mass on ids that a
            reduced head of the student lacks.

    Example:
        >>> from specjax import distill
        >>> Objective((0.5, distill.CrossEntropy()), (0.5, distill.Distill())).names
        ('cross_entropy', 'distill')
    """

    terms: tuple[tuple[float, Term], ...]
    chunk: int | None
    monitor: bool

    def __init__(
        self,
        *terms: tuple[float, Term],
        chunk: int | None = 1024,
        monitor: bool = True,
    ):
        """Weighs terms.

        Raises:
            ValueError: no term, a weight that is no number >= 0, a chunk below 1.
        """
        if not terms:
            raise ValueError("an objective needs at least one (weight, term), got none")
        for weight, term in terms:
            if not isinstance(term, Term) or not 0 <= weight < float("inf"):
                raise ValueError(
                    "an objective is made of (weight >= 0, term) pairs, got "
                    f"({weight!r}, {term!r})"
                )
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1 token or None, got {chunk}")
        object.__setattr__(self, "terms", terms)
        object.__setattr__(self, "chunk", chunk)
        object.__setattr__(self, "monitor", monitor)

    @classmethod
    def of(cls, objective: "Objective | Term") -> "Objective":
        """A lone term as an objective."""
        return cls((1.0, objective)) if isinstance(objective, Term) else objective

    @property
    def names(self) -> tuple[str, ...]:
        """One name a term, for the metrics: the registered one."""
        kinds = [_kind(term) for _, term in self.terms]
        return tuple(
            kind if kinds.count(kind) == 1 else f"{kind}_{kinds[:n].count(kind)}"
            for n, kind in enumerate(kinds)
        )

    @property
    def needs_teacher(self) -> bool:
        """Whether any term reads the target."""
        return any(term.needs_teacher for _, term in self.terms)

    @property
    def needs_reference(self) -> bool:
        """Whether any term compares with a reference draft."""
        return any(term.needs_reference for _, term in self.terms)

    def check(self, student: HeadedModel, teacher: HeadedModel | None) -> None:
        """Raises a ValueError where a term cannot work with these two."""
        for _, term in self.terms:
            if term.needs_teacher and teacher is None:
                raise ValueError(
                    f"the term {type(term).__name__} needs teacher=, got None"
                )
            term.check(student, teacher)

    def bind(self, student: HeadedModel, teacher: HeadedModel | None) -> "Objective":
        """The same objective, its terms bound to these two."""
        bound = [(weight, term.bind(student, teacher)) for weight, term in self.terms]
        return Objective(*bound, chunk=self.chunk, monitor=self.monitor)

    def init(
        self, key: Array, student: HeadedModel, teacher: HeadedModel | None
    ) -> tuple[Params, ...]:
        """What the terms learn besides the student, one entry a term."""
        keys = jax.random.split(key, len(self.terms))
        return tuple(
            term.init(key, student, teacher)
            for key, (_, term) in zip(keys, self.terms, strict=True)
        )

    def masks(self, batch: Batch) -> tuple[Array, ...]:
        """Of each term the tokens `[B, T]` that it counts."""
        return tuple(term.mask(batch) for _, term in self.terms)

    def scales(self, counts: dict[str, Array]) -> Scales:
        """Weight over loss tokens, of each term."""
        return tuple(
            weight / jnp.maximum(counts[name], 1).astype(jnp.float32)
            for name, (weight, _) in zip(self.names, self.terms, strict=True)
        )

    def __call__(
        self, models: Models, aux: tuple[Params, ...], batch: Batch, scales: Scales
    ) -> tuple[Array, Sums]:
        """The loss of one micro-batch, and what it counted.

        Args:
            models: who takes part; only the student gets gradients.
            aux: what `init` gave.
            batch: the sequences.
            scales: from `scales`, of the counts of all micro-batches.

        Returns:
            `sum_i scales_i * (sum of term i)`, and the sums of this micro-batch.
        """
        teacher = None if models.teacher is None else models.teacher.model
        bound = self.bind(models.student.model, teacher)
        outputs = _read(bound, models, batch)
        masks = bound.masks(batch)
        parts, monitored = _over_chunks(bound, models, outputs, batch, masks)
        for n, (_, term) in enumerate(bound.terms):
            more = term.per_batch(aux[n], outputs.student, outputs.teacher, batch)
            parts[n] = parts[n] if more is None else parts[n] + more
        weighted = [w * part for (w, _), part in zip(self.terms, parts, strict=True)]
        loss = sum(s * part for s, part in zip(scales, parts, strict=True))
        sums = dataclasses.replace(
            Sums.zeros(),
            parts=dict(zip(self.names, weighted, strict=True)),
            counts=bound.count(batch),
            agreement=monitored[0],
            overlap=monitored[1],
            outside=monitored[2],
            **_count(_any(masks), batch.on_policy),
        )
        return jnp.asarray(loss), sums

    def measure(
        self, models: Models, batch: Batch, aux: tuple[Params, ...] | None = None
    ) -> tuple[Array, Sums]:
        """The loss of a batch taken by itself, and what it counted."""
        batch = batch.for_head(models.student.model.head)
        aux = ((),) * len(self.terms) if aux is None else aux
        return self(models, aux, batch, self.scales(self.count(batch)))

    def count(self, batch: Batch) -> dict[str, Array]:
        """Loss tokens of each term: known before any model is run."""
        return {
            name: term.count(batch)
            for name, (_, term) in zip(self.names, self.terms, strict=True)
        }


@dataclass(frozen=True)
class _Outputs:
    student: LMOutput
    teacher: LMOutput | None
    reference: LMOutput | None


def _read(objective: Objective, models: Models, batch: Batch) -> _Outputs:
    """One pass of each model over the sequences, with all features asked for."""
    wanted = [term.features() for _, term in objective.terms]
    ours = tuple(dict.fromkeys(name for names, _ in wanted for name in names))
    theirs = tuple(dict.fromkeys(name for _, names in wanted for name in names))

    def read(policy: Policy | None, features: tuple[str, ...] = ()):
        if policy is None:
            return None
        return policy.model.apply(policy.params, batch.tokens, features=features)[0]

    student = read(models.student, ours)
    assert student is not None
    others = read(models.teacher, theirs), read(models.reference)
    return _Outputs(student, *jax.lax.stop_gradient(others))


def _over_chunks(
    objective: Objective,
    models: Models,
    outputs: _Outputs,
    batch: Batch,
    masks: tuple[Array, ...],
) -> tuple[list[Array], tuple[Array, Array, Array]]:
    """Adds up what the terms say of each position; and what is monitored.

    Chunks run along T, not B, so that rows stay where a mesh put them.
    """
    where = _Counted.of(batch)
    size = chunk_size(objective.chunk, batch.tokens.shape[0], where.width)
    masks = tuple(where.take(mask[:, 1:]) for mask in masks)
    hidden, labels, cached = where.take(
        (_Hidden.of(outputs), batch.tokens[:, 1:], _law_ahead(batch.cached))
    )
    terms = [term for _, term in objective.terms]

    # What is scored gets its weights from whole sequences, before the loss is taken.
    frozen = jax.lax.stop_gradient(models)

    def score(piece) -> list[Any]:
        hidden, labels, cached = piece
        view = _view(frozen, hidden, labels, cached, None)
        return [term.score(view) for term in terms]

    scores: list[Any] = [None] * len(terms)
    if any(type(term).score is not Term.score for term in terms):
        still = jax.lax.stop_gradient((hidden, labels, cached))
        scores = jax.lax.stop_gradient(map_chunks(score, still, size))
        scores = where.put(scores)
    weights = where.take(
        [term.weigh(scored, batch) for term, scored in zip(terms, scores, strict=True)]
    )

    def one(models: Models, piece):
        hidden, labels, cached, weights, masks = piece
        bare = _view(models, hidden, labels, cached, None)
        views = [dataclasses.replace(bare, weights=weight) for weight in weights]
        losses = [term.per_token(v) for term, v in zip(terms, views, strict=True)]
        parts = [
            jnp.zeros(()) if loss is None else jnp.sum(jnp.where(mask, loss, 0.0))
            for loss, mask in zip(losses, masks, strict=True)
        ]
        watched = jnp.zeros(()), jnp.zeros(()), jnp.zeros(())
        if objective.monitor:
            watched = _monitor(jax.lax.stop_gradient(bare), _any(masks))
        return parts, watched

    pieces = (hidden, labels, cached, weights, masks)
    parts, watched = sum_chunks(lambda piece: one(models, piece), pieces, size)
    return [where.checked(part) for part in parts], watched


@dataclass(frozen=True)
class _Counted:
    """The positions that are looked at: of T - 1 that predict something, K of each row.

    K is the batch's `loss_width`, if it knows one: the rest of the row has no loss.
    """

    index: Array | None  # [B, K]; None: all
    width: int  # K
    total: int  # T - 1
    fits: Array  # [] bool, no row counts more

    @classmethod
    def of(cls, batch: Batch) -> "_Counted":
        counted = batch.mask[:, 1:]
        width = counted.shape[1]
        if batch.loss_width is None or batch.loss_width >= width:
            return cls(None, width, width, jnp.ones((), bool))
        # Those that count come first, in their order.
        index = jnp.argsort(~counted, axis=1, stable=True)[:, : batch.loss_width]
        fits = jnp.all(jnp.sum(counted, axis=1) <= batch.loss_width)
        return cls(index, batch.loss_width, width, fits)

    def take(self, tree: Any) -> Any:
        """`[B, T-1, ...]` arrays at these positions, `[B, K, ...]`."""
        tree, index = jax.tree.map(jnp.asarray, tree), self.index
        if index is None:
            return tree
        rows = jax.vmap(lambda row, places: row[places])
        return jax.tree.map(lambda x: rows(x, index), tree)

    def put(self, tree: Any) -> Any:
        """The inverse: zero at the other positions."""
        index, total = self.index, self.total
        if index is None:
            return tree

        def row(x: Array, places: Array) -> Array:
            empty = jnp.zeros((total, *x.shape[1:]), x.dtype)
            return empty.at[places].set(x, unique_indices=True)

        return jax.tree.map(lambda x: jax.vmap(row)(x, index), tree)

    def checked(self, part: Array) -> Array:
        """A loss, or NaN where a row counts more tokens than its batch knows of."""
        return jnp.where(self.fits, part, jnp.nan)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Hidden:
    """Hidden states `[B, T-1, D]` of the positions that predict something."""

    student: Array
    teacher: Array | None
    reference: Array | None

    @classmethod
    def of(cls, outputs: _Outputs) -> "_Hidden":
        def cut(out: LMOutput | None) -> Array | None:
            return None if out is None else out.hidden[:, :-1]

        return cls(cut(outputs.student), cut(outputs.teacher), cut(outputs.reference))  # pyright: ignore


def _view(models: Models, hidden: _Hidden, labels, cached, weights) -> TokenView:
    def logits(policy: Policy | None, hidden: Array | None, reduced: bool = False):
        if policy is None or hidden is None:
            return None
        return policy.model.unembed(policy.params, hidden, reduced=reduced)

    q_logits = logits(models.student, hidden.student, reduced=True)
    assert q_logits is not None
    p_logits = logits(models.teacher, hidden.teacher)
    reference = logits(models.reference, hidden.reference)
    p_logits, reference = jax.lax.stop_gradient((p_logits, reference))
    head = models.student.model.head
    return TokenView(labels, q_logits, p_logits, reference, cached, weights, head)


def _law_ahead(cached: Any) -> Any:
    """The cached law of token t + 1 is kept at t: the last one predicts nothing."""
    return jax.tree.map(lambda x: x[:, :-1], cached)


def _monitor(view: TokenView, mask: Array) -> tuple[Array, Array, Array]:
    """Sums of agreement, overlap and the mass outside the head, see `Objective`."""
    log_q, outside = log_law(view.q_logits), jnp.zeros(())
    if view.p_logits is None:
        same = _best(log_q, view.head) == view.labels
        overlap = jnp.exp(at_labels(log_q, view))
    else:
        log_p = log_law(view.p_logits)
        if view.head is None:
            size = min(log_p.shape[-1], log_q.shape[-1])
            log_p, log_q = log_p[..., :size], log_q[..., :size]
        same = _argmax(log_p) == _best(log_q, view.head)
        # Not renormalised: what the draft cannot write is never accepted.
        log_p = on_head(log_p, view.head)
        overlap = jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)
        if view.head is not None:
            mass = jnp.sum(jnp.exp(log_p), axis=-1)
            outside = jnp.sum(jnp.where(mask, 1.0 - mass, 0.0))
    agreement = jnp.sum(same & mask).astype(jnp.float32)
    return agreement, jnp.sum(jnp.where(mask, overlap, 0.0)), outside


def _best(log_q: Array, head: HeadVocabulary | None) -> Array:
    best = _argmax(log_q)
    return best if head is None else jnp.asarray(head.ids)[best]


def _argmax(x: Array) -> Array:
    """The first of the largest along V: two plain reductions, which XLA vectorises."""
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    index = index.reshape((1,) * (x.ndim - 1) + (-1,))
    largest = jnp.max(x, axis=-1, keepdims=True)
    return jnp.min(jnp.where(x == largest, index, x.shape[-1]), axis=-1)


def _any(masks: tuple[Array, ...]) -> Array:
    return jnp.any(jnp.stack(masks), axis=0)


def _count(mask: Array, on_policy: Array) -> dict[str, Array]:
    return {
        "tokens": jnp.sum(mask, dtype=jnp.int32),
        "on_policy_tokens": jnp.sum(mask & on_policy[:, None], dtype=jnp.int32),
        "rows": jnp.asarray(mask.shape[0], jnp.int32),
        "empty_rows": jnp.sum(~jnp.any(mask, axis=1), dtype=jnp.int32),
    }


def _kind(term: Term) -> str:
    """The name that a term is registered under, or its class in small letters."""
    for name in registry.names():
        if registry.get(name) is type(term):
            return name
    return type(term).__name__.lower()

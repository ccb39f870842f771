"""What a step minimises: a sum over loss tokens, made a few positions at a time.

Axes: B rows, T positions, C positions of a chunk, D width, V vocabulary.

Logits at position t predict token t + 1. The logits of teacher and student are the
largest arrays of a distillation step (`[B, T, V]`, twice, and their gradients), so they
are made chunk by chunk from the hidden states and made again for the gradient.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import Params
from specjax.distill._state import Batch, Policy, Sums
from specjax.divergences import Divergence

# (student logits [B, C, V], teacher logits or None, labels [B, C], mask [B, C],
#  on_policy [B]) -> Sums
ChunkTerm = Callable[[Array, Any, Array, Array, Array], Sums]


class Objective(Protocol):
    """A loss to minimise. Frozen and hashable.

    It returns sums; the step divides by the number of loss tokens of *all* its
    micro-batches.
    """

    @property
    def needs_teacher(self) -> bool:
        """Whether it reads the target."""
        ...

    def __call__(self, student: Policy, teacher: Policy | None, batch: Batch) -> Sums:
        """Sums over the loss tokens of a batch; `loss` is differentiated."""
        ...


@dataclass(frozen=True)
class Distill:
    """A divergence between the target's law and the draft's, token by token.

    Attributes:
        divergence: `(log_p, log_q) -> [*B]`, from `divergences.resolve`.
        temperature: divides the logits of both, > 0. The loss is not multiplied by its
            square.
        cross_entropy: weight of an added cross-entropy on the tokens themselves. Rows
            that the student wrote are no labels: they get none of it.
        shared_vocab: V of the comparison, where vocabularies are padded to different
            sizes; default the smaller. Both laws are renormalised over those ids.
        chunk: tokens whose logits are alive at once; None: all.
        monitor: count agreement and overlap too (a few more passes over the logits).
            `overlap` is sum min(p, q), the acceptance of drafts at `temperature`.

    Reference: Zhou et al., DistillSpec, arXiv 2310.08461, equation 2, with one
    difference: the mean is over all loss tokens, not of each sequence's mean.
    """

    divergence: Divergence = Divergence("forward_kl")  # noqa: RUF009 (frozen)
    temperature: float = 1.0
    cross_entropy: float = 0.0
    shared_vocab: int | None = None
    chunk: int | None = 1024
    monitor: bool = True

    needs_teacher = True

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")
        _check_chunk(self.chunk)

    def __call__(self, student: Policy, teacher: Policy | None, batch: Batch) -> Sums:
        """See `Objective`."""
        if teacher is None:
            raise ValueError("Distill needs a teacher, got none")
        return sum_over_chunks(student, teacher, batch, self.chunk, self._term)

    def _term(self, q_logits, p_logits, labels, mask, on_policy) -> Sums:
        p_logits = jax.lax.stop_gradient(p_logits)
        size = self.shared_vocab or min(q_logits.shape[-1], p_logits.shape[-1])
        log_q = self._log(q_logits[..., :size])
        log_p = self._log(p_logits[..., :size])
        loss = jnp.where(mask, self.divergence(log_p, log_q), 0.0)
        if self.cross_entropy:
            labelled = mask & ~on_policy[:, None]
            loss += self.cross_entropy * _nll(q_logits, labels, labelled)
        agreement = overlap = jnp.zeros(())
        if self.monitor:
            log_q = jax.lax.stop_gradient(log_q)
            same = _argmax(log_p) == _argmax(log_q)
            agreement = jnp.sum(same & mask).astype(jnp.float32)
            accepted = jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)
            overlap = jnp.sum(jnp.where(mask, accepted, 0.0))
        return _sums(jnp.sum(loss), agreement, overlap, mask, on_policy)

    def _log(self, logits: Array) -> Array:
        """`ops.warp` at a temperature known to be positive: without its arg max."""
        scaled = logits.astype(jnp.float32) / self.temperature
        return jax.nn.log_softmax(scaled, axis=-1)


@dataclass(frozen=True)
class CrossEntropy:
    """Next-token prediction: pre-training a target, and the baseline draft.

    Rows that the student wrote are no labels and count nothing. `overlap` is the
    probability of the label.

    Attributes:
        chunk: tokens whose logits are alive at once; None: all.
        monitor: count agreement with the label too.
    """

    chunk: int | None = 1024
    monitor: bool = True

    needs_teacher = False

    def __post_init__(self):
        _check_chunk(self.chunk)

    def __call__(self, student: Policy, teacher: Policy | None, batch: Batch) -> Sums:
        """See `Objective`."""
        return sum_over_chunks(student, None, batch, self.chunk, self._term)

    def _term(self, q_logits, p_logits, labels, mask, on_policy) -> Sums:
        mask = mask & ~on_policy[:, None]
        loss = _nll(q_logits, labels, mask)
        agreement = overlap = jnp.zeros(())
        if self.monitor:
            same = (_argmax(q_logits) == labels) & mask
            agreement = jnp.sum(same).astype(jnp.float32)
            chance = jnp.where(mask, jnp.exp(-jax.lax.stop_gradient(loss)), 0.0)
            overlap = jnp.sum(chance)
        return _sums(jnp.sum(loss), agreement, overlap, mask, on_policy)


def sum_over_chunks(
    student: Policy,
    teacher: Policy | None,
    batch: Batch,
    chunk: int | None,
    term: ChunkTerm,
) -> Sums:
    """Adds up `term` over the predicted positions of a batch.

    Chunks run along T, not B, so that rows stay where a mesh put them.

    Args:
        student: gets gradients.
        teacher: gets none; None: the term's teacher logits are None.
        batch: the sequences.
        chunk: tokens whose logits are alive at once; None: all.
        term: the sums of one chunk.
    """
    batch_size, width = batch.tokens.shape
    hidden_q = _hidden(student, batch.tokens)
    hidden_p = None
    if teacher is not None:
        hidden_p = jax.lax.stop_gradient(_hidden(teacher, batch.tokens))
    labels, mask = batch.tokens[:, 1:], batch.mask[:, 1:]
    on_policy = batch.on_policy

    def one(q_params: Params, p_params: Params, chunk_of) -> Sums:
        hidden_q, hidden_p, labels, mask = chunk_of
        q_logits = student.model.unembed(q_params, hidden_q)
        p_logits = None
        if teacher is not None:
            p_logits = teacher.model.unembed(p_params, hidden_p)
        return term(q_logits, p_logits, labels, mask, on_policy)

    positions = width - 1
    size = positions if chunk is None else max(1, chunk // batch_size)
    pieces = (hidden_q, hidden_p, labels, mask)
    p_params = None if teacher is None else teacher.params
    if size >= positions:
        sums = one(student.params, p_params, pieces)
    else:
        pieces = jax.tree.map(lambda x: _chunks(x, size), pieces)
        again = jax.checkpoint(one)

        def add(total: Sums, piece) -> tuple[Sums, None]:
            return total + again(student.params, p_params, piece), None

        sums, _ = jax.lax.scan(add, Sums.zeros(), pieces)
    return _count_rows(sums, mask)


def _hidden(policy: Policy, tokens: Array) -> Array:
    """Hidden states `[B, T-1, D]` of the positions that predict something."""
    out, _ = policy.model.apply(policy.params, tokens)
    return out.hidden[:, :-1]


def _chunks(x: Array, size: int) -> Array:
    """`[B, T, ...]` as `[chunks, B, size, ...]`, padded with zeros (masked)."""
    more = [(0, 0)] * x.ndim
    more[1] = (0, -x.shape[1] % size)
    x = jnp.pad(x, more)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _nll(logits: Array, labels: Array, mask: Array) -> Array:
    """Minus the log-probability of each label `[B, C]`, 0 where masked."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0)


def _argmax(x: Array) -> Array:
    """The first of the largest along V: two plain reductions, which XLA vectorises."""
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    index = index.reshape((1,) * (x.ndim - 1) + (-1,))
    largest = jnp.max(x, axis=-1, keepdims=True)
    return jnp.min(jnp.where(x == largest, index, x.shape[-1]), axis=-1)


def _sums(loss, agreement, overlap, mask, on_policy) -> Sums:
    zeros = Sums.zeros()
    return Sums(
        loss=loss,
        tokens=jnp.sum(mask, dtype=jnp.int32),
        agreement=agreement,
        overlap=overlap,
        on_policy_tokens=jnp.sum(mask & on_policy[:, None], dtype=jnp.int32),
        rows=zeros.rows,
        empty_rows=zeros.empty_rows,
        updates=zeros.updates,
        skipped=zeros.skipped,
        grad_norm=zeros.grad_norm,
    )


def _count_rows(sums: Sums, mask: Array) -> Sums:
    empty = jnp.sum(~jnp.any(mask, axis=1), dtype=jnp.int32)
    rows = jnp.asarray(mask.shape[0], jnp.int32)
    return dataclasses.replace(sums, rows=rows, empty_rows=empty)


def _check_chunk(chunk: int | None) -> None:
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token or None, got {chunk}")

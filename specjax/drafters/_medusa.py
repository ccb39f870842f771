"""Medusa: heads on the target's last hidden state that guess several tokens ahead.

Axes: B rows, T positions, K heads, D width, V vocabulary, G depth of the tree, M nodes.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core import (
    Checkpoint,
    Context,
    Feedback,
    LanguageModel,
    LMOutput,
    Params,
    Proposal,
    record,
)
from specjax.divergences import forward_kl
from specjax.drafters._made_for import MadeFor, check_sizes, hidden_width
from specjax.drafters._registry import registry
from specjax.drafters._trees import as_paths, parents_of
from specjax.ops import chunk_size, locate, sum_chunks


@record
class _State:
    """The target's hidden state before the newest token, see `Medusa`."""

    hidden: Array  # [B, D]
    known: Array  # [B] bool; False: nothing has been read yet


@registry.register("medusa")
@dataclasses.dataclass(frozen=True)
class Medusa:
    """Drafts a static tree from K heads on one hidden state, without a draft model.

    From the hidden state h of position t the target itself gives token t + 1, and head
    k = 1 .. K guesses token t + k + 1, blind to those between:

        q_k = softmax(W2_k (SiLU(W1_k h) + h))

    W1 begins at zero and W2 as the target's own head, so that every head begins as a
    guess of token t + 1. Node (i, j) of the tree is the j-th best token of head 2
    behind the i-th best of head 1. Nothing is drawn: drafts are point masses, lossless
    with verifiers of trees, and fast with the lossy `typical`, as in the paper.

    The state is h at the last position that the target has read, whose next token is
    the newest one. A row with a prompt of one token has none before its first round,
    and drafts nothing in it.

    Attributes:
        num_heads: K; the tree uses the first G of them.
        tree: widths, `(3, 2, 1)` for all combinations of the best 3, 2 and 1 tokens of
            the first three heads; or nodes as paths, `((0,), (1,), (0, 0))`, see
            `sparse_tree`. As an attribute always the paths. With every width 1 it is a
            chain, which every verifier takes.
        share_head: W2 of all heads is the target's own head, which is neither stored
            nor trained here: D * D parameters a head. With False each head has a copy
            of its own, V * D more: for SmolLM2-135M (V = 49,152, D = 576) 28 million a
            head, so that four would outweigh half of the target. Drafting costs about
            the same either way.
        labels: "hard" trains on the tokens of the text (as in the paper), "soft" on the
            target's law at each of them, by KL(p || q_k).
        decay: the weight of head k's loss is `decay ** k`.
        chunk: in training, the most `[V]` logits that are alive at once.
        params: its own, `{"w1": [K, D, D]}` and, unless shared, `"w2": [K, D, V]`.
        made_for: the target that they were trained for; set by `drafters.load`.
        model: the target's (set by `bind`).

    Reference: Cai et al., Medusa, arXiv 2401.10774, section 2. The loss of head k is
    divided by the tokens of head 1 (those with a token two ahead), not by its own.

    Example:
        >>> Medusa(tree=(2, 1)).tree, Medusa(tree=(2, 1)).num_nodes
        (((0,), (1,), (0, 0), (1, 0)), 4)
    """

    num_heads: int = 4
    tree: tuple[Any, ...] = (3, 2, 1, 1)
    share_head: bool = True
    labels: Literal["hard", "soft"] = "hard"
    decay: float = 0.8
    chunk: int = 1024
    params: Params = dataclasses.field(default=None, compare=False, repr=False)
    made_for: MadeFor | None = None
    model: LanguageModel | None = None

    def __post_init__(self):
        object.__setattr__(self, "tree", as_paths(self.tree))
        for name in ("num_heads", "chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        if self.gamma > self.num_heads:
            raise ValueError(
                f"the tree is {self.gamma} deep, but there are {self.num_heads} heads: "
                "a level needs a head"
            )
        if self.labels not in ("hard", "soft"):
            raise ValueError(f"labels must be 'hard' or 'soft', got {self.labels!r}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay!r}")

    @property
    def gamma(self) -> int:
        """G, the depth of the tree."""
        return max(len(path) for path in self.tree)

    @property
    def num_nodes(self) -> int:
        """M, the nodes of the tree."""
        return len(self.tree)

    @property
    def features(self) -> tuple[str, ...]:
        """None: the hidden state that the target's head reads is enough."""
        return ()

    def init_params(self, key: Array, target: Checkpoint) -> Params:
        """W1 = 0, and W2 as the target's head; nothing of it is random."""
        model: Any = _headed(target.model)
        width = hidden_width(model)
        own = {"w1": jnp.zeros((self.num_heads, width, width), jnp.float32)}
        if self.share_head:
            return own
        if getattr(model, "head", None) is not None:
            raise ValueError(
                "heads of their own begin as the target's head, and this target's is "
                "reduced to some ids: use share_head=True"
            )
        # A head is linear: its value on the unit vectors is its weight [D, V].
        w2 = model.unembed(target.params, jnp.eye(width)).astype(jnp.float32)
        return own | {"w2": jnp.repeat(w2[None], self.num_heads, axis=0)}

    def with_params(self, own: Params) -> "Medusa":
        """The same heads with these parameters."""
        return dataclasses.replace(self, params=own)

    def for_model(self, model: LanguageModel) -> "Medusa":
        """See `TrainableDrafter.for_model`."""
        widest = 1 + max(max(path) for path in self.tree)
        if widest > model.vocab_size:
            raise ValueError(
                f"the tree takes the {widest} best tokens of a head, but the target "
                f"has {model.vocab_size} in all"
            )
        model = _headed(model)
        return dataclasses.replace(self, model=model, params=None, made_for=None)

    def bind(self, target: Checkpoint, max_length: int) -> tuple["Medusa", Params]:
        """See `Drafter.bind`: the heads must be made for this target."""
        if self.params is None:
            raise ValueError(
                "Medusa needs trained heads to draft with: use drafters.load(folder), "
                "or with_params(...)"
            )
        self._check_params(target)
        if self.made_for is not None:
            self.made_for.check("medusa", target)
        params = {"own": self.params, "target": target.params}
        return self.for_model(target.model), params

    def init(
        self,
        params: Params,
        tokens: Array,
        length: Array,
        capacity: int,
        target: LMOutput,
    ) -> _State:
        """Takes the hidden state before each prompt's last token."""
        last = jnp.maximum(length - 2, 0)
        hidden = jax.vmap(lambda row, index: row[index])(target.hidden, last)
        return _State(hidden, length >= 2)

    def propose(
        self, params: Params, keys: Array, state: _State, context: Context
    ) -> tuple[Proposal, _State]:
        """The tree over the best tokens of each head."""
        ranks = np.array([path[-1] for path in self.tree])
        depths = np.array([len(path) for path in self.tree])
        logits = self._logits(params, state.hidden, self.gamma)
        _, best = jax.lax.top_k(logits, int(ranks.max()) + 1)  # [B, G, ranks]
        tokens = best[:, depths - 1, ranks].astype(jnp.int32)
        drafted = jnp.where(state.known, self.num_nodes, 0).astype(jnp.int32)
        proposal = Proposal.tree(
            tokens, None, drafted, parents_of(self.tree), self.gamma
        )
        return proposal, state

    def commit(self, params: Params, state: _State, feedback: Feedback) -> _State:
        """Takes the hidden state before the newest token."""
        hidden = feedback.at_end(feedback.target.hidden)
        return _State(hidden.astype(state.hidden.dtype), jnp.ones_like(state.known))

    def loss(
        self, params: Params, keys: Array, tokens: Array, mask: Array, target: LMOutput
    ) -> tuple[Array, dict[str, Array]]:
        """See `TrainableDrafter.loss`: sum_k decay^k CE_k, or KL for soft labels.

        Head k counts at position t if the tokens t + 2 .. t + k + 1 all do: in decoding
        a draft is looked at only behind accepted ones.
        """

        def one(piece) -> tuple[Array, Array]:
            hidden, ahead, labels, counted = piece
            logits = self._logits(params, hidden, self.num_heads)
            losses, right = self._losses(params, logits, ahead, labels)
            axes = (0, 1)
            return (
                jnp.sum(jnp.where(counted, losses, 0.0), axes),
                jnp.sum(right & counted, axes, dtype=jnp.int32),
            )

        labels, counted = self._ahead(tokens, mask)
        ahead = self._hidden_ahead(target.hidden) if self.labels == "soft" else None
        pieces = (target.hidden, ahead, labels, counted)
        losses, right = sum_chunks(one, pieces, self._chunk(tokens))
        count = jnp.sum(counted, axis=(0, 1), dtype=jnp.int32)
        weights = self.decay ** np.arange(1, self.num_heads + 1, dtype=np.float32)
        sums = {"tokens": count[0]}
        for k in range(self.num_heads):
            sums[f"tokens/head_{k + 1}"] = count[k]
            sums[f"loss/head_{k + 1}"] = jax.lax.stop_gradient(losses[k])
            sums[f"agreement/head_{k + 1}"] = right[k]
        return jnp.sum(losses * weights), sums

    def ranks(
        self, params: Params, tokens: Array, mask: Array, target: LMOutput, best: int
    ) -> tuple[Array, Array]:
        """How often the i-th best token of each head is the right one.

        Called as `for_model` returns it; counts of several batches add up.

        Args:
            params: as from `bind`.
            tokens: `[B, T]`.
            mask: `[B, T]`, see `loss`.
            target: the target's output on `tokens`.
            best: how many tokens of each head to look at.

        Returns:
            Counts `[K, best]`, and of how many `[K]`: their ratio is what `sparse_tree`
            takes.
        """

        def one(piece) -> Array:
            hidden, labels, counted = piece
            logits = self._logits(params, hidden, self.num_heads)
            rank = jnp.arange(best)[None, None, None, :]
            found = _rank(logits, labels)[..., None] == rank
            return jnp.sum(found & counted[..., None], (0, 1), dtype=jnp.int32)

        labels, counted = self._ahead(tokens, mask)
        pieces = (target.hidden, labels, counted)
        hits = sum_chunks(one, pieces, self._chunk(tokens))
        return hits, jnp.sum(counted, axis=(0, 1), dtype=jnp.int32)

    def _logits(self, params: Params, hidden: Array, heads: int) -> Array:
        """Float32 logits `[*B, heads, V]` of the first heads on `hidden [*B, D]`."""
        own, model = params["own"], self.model
        assert model is not None, "bind comes first"
        h = hidden.astype(own["w1"].dtype)
        z = jnp.einsum("...d,kde->...ke", h, own["w1"][:heads])
        z = jax.nn.silu(z) + h[..., None, :]
        if self.share_head:
            logits = _headed(model).unembed(params["target"], z.astype(hidden.dtype))
        else:
            logits = jnp.einsum("...kd,kdv->...kv", z, own["w2"][:heads])
        return logits.astype(jnp.float32)

    def _losses(
        self, params: Params, logits: Array, ahead: Array | None, labels: Array
    ) -> tuple[Array, Array]:
        """The loss `[B, T, K]` of each head, and whether its best token is right."""
        best = jnp.argmax(logits, axis=-1)
        if ahead is None:
            chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
            return jax.nn.logsumexp(logits, axis=-1) - chosen, best == labels
        theirs = _headed(self.model).unembed(params["target"], ahead)
        theirs = jax.lax.stop_gradient(theirs.astype(jnp.float32))
        log_p = jax.nn.log_softmax(theirs, axis=-1)
        log_q = jax.nn.log_softmax(logits, axis=-1)
        return forward_kl(log_p, log_q), best == jnp.argmax(theirs, axis=-1)

    def _ahead(self, tokens: Array, mask: Array) -> tuple[Array, Array]:
        """What head k should say at position t, `[B, T, K]`, and whether it counts."""
        head = getattr(self.model, "head", None)
        if head is not None:  # what the target's head cannot write is no label
            mask = mask & locate(tokens, head.ids)[1]
        labels, counted, run = [], [], True
        for k in range(1, self.num_heads + 1):
            labels.append(_shift(tokens, k + 1))
            run = _shift(mask, k + 1) & run
            counted.append(run)
        return jnp.stack(labels, axis=-1), jnp.stack(counted, axis=-1)

    def _hidden_ahead(self, hidden: Array) -> Array:
        """The states `[B, T, K, D]` whose next token is that which head k guesses."""
        shifted = [_shift(hidden, k) for k in range(1, self.num_heads + 1)]
        return jax.lax.stop_gradient(jnp.stack(shifted, axis=2))

    def _chunk(self, tokens: Array) -> int:
        """Positions whose logits are alive at once."""
        rows, width = tokens.shape
        return chunk_size(self.chunk, self.num_heads * rows, width)

    def _check_params(self, target: Checkpoint) -> None:
        shapes = {name: leaf.shape for name, leaf in self.params.items()}
        width, vocab = shapes["w1"][-1], None
        if not self.share_head:
            vocab = shapes.get("w2", (0,))[-1]
        check_sizes("medusa", width, vocab, target.model)
        wanted = {"w1": (self.num_heads, width, width)}
        if vocab is not None:
            wanted["w2"] = (self.num_heads, width, vocab)
        if shapes != wanted:
            raise ValueError(
                f"{self.num_heads} heads with share_head={self.share_head} have the "
                f"parameters {wanted}, got {shapes}"
            )


def _headed(model: LanguageModel | None) -> Any:
    """The model, known to offer its head alone."""
    if getattr(model, "unembed", None) is None:
        raise ValueError(
            "Medusa needs a target whose head can be called alone (unembed), got "
            f"{type(model).__name__}"
        )
    return model


def _rank(logits: Array, labels: Array) -> Array:
    """How many tokens `[*B]` come before each label, ties by their ids as in top-k."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    index = jnp.arange(logits.shape[-1]).reshape((1,) * labels.ndim + (-1,))
    before = (logits > chosen) | ((logits == chosen) & (index < labels[..., None]))
    return jnp.sum(before, axis=-1)


def _shift(x: Array, by: int) -> Array:
    """`x [B, T, ...]` from `by` positions further on; zeros behind the end."""
    by = min(by, x.shape[1])
    more = [(0, 0)] * x.ndim
    more[1] = (0, by)
    return jnp.pad(x[:, by:], more)

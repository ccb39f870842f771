"""What EAGLE drafters share: drafting with one block on features of the target.

Axes: B rows, T positions, P prompt positions, R roots in training, K steps, G draft
length, D width, W ids of the draft's head, V vocabulary.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import (
    Checkpoint,
    Context,
    Feedback,
    KVCache,
    LanguageModel,
    LMOutput,
    Params,
    Proposal,
    record,
)
from specjax.drafters._chain import draw_chain, require_confidence
from specjax.drafters._draft_tree import grow_tree, num_candidates
from specjax.drafters._made_for import MadeFor, check_sizes
from specjax.drafters._registry import require_gamma
from specjax.models import CausalLM, EagleNet
from specjax.ops import chunk_size, locate, restrict, sum_chunks


@record
class _State:
    """Between rounds; see `OnFeatures`."""

    cache: KVCache  # slots of the target's own features, all read
    h: Array  # [B, G+1, D], features behind them that are to be read next


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnFeatures:
    """A drafter that reads the target's features f and guesses the next ones.

    Slot i of its cache is made of f_i and token i + 1, which the target has drawn from
    f_i but not read: so the draft knows more than f_i does. What comes out, a_i, is a
    guess of f_{i+1}, gives the law of token i + 2, and stands in for f_{i+1} in slot
    i + 1. The target's verifying pass brings the true features of all accepted drafts;
    the first pass of the next round reads them over the slots of the guesses, G + 1
    pairs in one shape, of which the first `num_accepted + 1` are there.

    With a prompt of one token no feature has been seen before the first round, and
    nothing is drafted in it.

    Attributes:
        gamma: G, tokens drafted in a round; of a tree its depth.
        nodes: None: a chain, each token drawn from the draft's law, for all verifiers.
            M: the M likeliest nodes of a tree that grows where the draft is sure, point
            masses, lossless with verifiers of trees (EAGLE-2).
        top_k: of a tree, how many nodes of a level are expanded, and into how many each
            (default 10).
        min_confidence: of a chain, where to stop, as in `TwoModel`.
        chunk: in training, the most `[V]` logits that are alive at once.
        params: its own.
        made_for: the target that they were trained for; set by `drafters.load`.
        model: the target's (set by `bind`).
    """

    gamma: int = 5
    nodes: int | None = None
    top_k: int | None = None
    min_confidence: float | None = None
    chunk: int = 1024
    params: Params = dataclasses.field(default=None, compare=False, repr=False)
    made_for: MadeFor | None = None
    model: CausalLM | None = None

    kind: ClassVar[str]  # its registered name, for messages

    def __post_init__(self):
        require_gamma(self.gamma)
        require_confidence(self.min_confidence)
        for name in ("nodes", "top_k", "chunk"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole and value >= 1) and (value is not None or name == "chunk"):
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        if self.nodes is None:
            if self.top_k is not None:
                raise ValueError(
                    f"top_k={self.top_k} is how a tree grows: give its nodes as well, "
                    "or leave top_k out for a chain"
                )
            return
        if self.min_confidence is not None:
            raise ValueError(
                "min_confidence is where a chain stops, a tree always has its "
                f"{self.nodes} nodes: give one of the two"
            )
        most = num_candidates(self.gamma, self._width)
        if not self.gamma < self.nodes <= most:
            raise ValueError(
                f"a tree of the depth gamma={self.gamma} with top_k={self._width} has "
                f"{self.gamma + 1} to {most} nodes, got nodes={self.nodes}; leave "
                "nodes out for a chain"
            )

    @property
    def num_nodes(self) -> int:
        """M, the tokens drafted in a round."""
        return self.gamma if self.nodes is None else self.nodes

    @property
    def net(self) -> EagleNet:
        """The network for the target that it is bound to."""
        raise NotImplementedError

    @property
    def _width(self) -> int:
        """k, with its default."""
        return 10 if self.top_k is None else self.top_k

    def with_params(self, own: Params) -> Any:
        """The same drafter with these parameters."""
        return dataclasses.replace(self, params=own)

    def for_model(self, model: LanguageModel) -> Any:
        """See `TrainableDrafter.for_model`."""
        if not isinstance(model, CausalLM):
            raise ValueError(
                f"the drafter {self.kind} reads the target's embedding and layers, so "
                f"the target must be a models.CausalLM, got a {type(model).__name__}"
            )
        return dataclasses.replace(self, model=model, params=None, made_for=None)

    def bind(self, target: Checkpoint, max_length: int) -> tuple[Any, Params]:
        """See `Drafter.bind`: it must be made for this target."""
        if self.params is None:
            raise ValueError(
                f"the drafter {self.kind} needs trained parameters to draft with: use "
                "drafters.load(folder), or with_params(...)"
            )
        bound = self.for_model(target.model)
        _check_params(bound, self.params)
        if self.made_for is not None:
            self.made_for.check(self.kind, target)
        if self.nodes is not None and self._width > bound.num_ids:
            raise ValueError(
                f"the tree takes the {self._width} best tokens of a node, but the "
                f"draft can write {bound.num_ids} in all: set top_k"
            )
        return bound, {"own": self.params, "target": target.params}

    @property
    def num_ids(self) -> int:
        """W, how many ids the draft can write; of a bound drafter."""
        return self._target.config.head_size

    def init(
        self,
        params: Params,
        tokens: Array,
        length: Array,
        capacity: int,
        target: LMOutput,
    ) -> _State:
        """Reads all features of the prompts but the last, which the first round reads.

        (Of a prompt of one token the cache's length is -1: what would be written there
        is dropped.)
        """
        h = self._fuse(params, self._raw(target))
        branches = 0 if self.nodes is None else (self.gamma - 1) * self._width
        cache = self.net.init_cache(tokens.shape[0], capacity + branches, h.dtype)
        if tokens.shape[1] > 2:
            _, cache = self._read(params, tokens[:, 1:-1], h[:, :-1], cache)
        newest = _at(h, jnp.maximum(length - 2, 0))
        pending = jnp.pad(newest[:, None], ((0, 0), (0, self.gamma), (0, 0)))
        return _State(cache.with_length(length - 2), pending)

    def propose(
        self, params: Params, keys: Array, state: _State, context: Context
    ) -> tuple[Proposal, _State]:
        """Reads the newest features, then drafts a chain or a tree on guesses."""
        start, size = state.cache.length, self.gamma + 1
        index = start[:, None] + 1 + jnp.arange(size)[None, :]
        tokens = context.token_at(index)
        a, cache = self._read(params, tokens, state.h, state.cache)
        a = _at(a, jnp.clip(context.length - 2 - start, 0, self.gamma))
        cache = cache.with_length(context.length - 1)
        known = context.length >= 2
        if self.nodes is not None:
            proposal = self._tree(params, a, cache, known)
        else:
            running = known if context.running is None else known & context.running
            context = dataclasses.replace(context, running=running)
            proposal, cache = self._chain(params, keys, a, cache, context)
        return proposal, dataclasses.replace(state, cache=cache)

    def commit(self, params: Params, state: _State, feedback: Feedback) -> _State:
        """Keeps the slots of true features; those of this round are read next."""
        raw = tuple(feedback.along_path(x) for x in self._raw(feedback.target))
        length = feedback.length - feedback.num_accepted - 2
        return _State(state.cache.with_length(length), self._fuse(params, raw))

    def guess_ahead(
        self,
        params: Params,
        tokens: Array,
        target: LMOutput,
        steps: int,
        noise: Array | None = None,
    ) -> Array:
        """What the draft guesses K steps long from every root, drafts being the text.

        From root i, step s = 0 .. K - 1 is that which drafts token i + 2 + s in a round
        that began behind token i + 1: it stands at position i + s, reads token
        i + 1 + s and the guess of step s - 1, and sees the features up to i and its own
        earlier steps. So the slots of step 0 are seen causally, and of each later step
        the one of the same root: the training-time test of EAGLE-3.

        Args:
            params: as from `bind`.
            tokens: `[B, T]`.
            target: the target's output on them.
            steps: K.
            noise: `[B, T-1, D]`, added to the features; None: none.

        Returns:
            a `[B, R, K, D]`, R = T - 1; `logits` makes logits of them.

        Reference: Li et al., EAGLE-3, arXiv 2503.01840, section 3.2 and figure 6.
        """
        h = self._fuse(params, self._raw(target))[:, :-1]
        h = h if noise is None else h + noise
        batch, roots = h.shape[:2]
        cache = self.net.init_cache(batch, roots, h.dtype)
        causal, same = jnp.tri(roots, dtype=bool), jnp.eye(roots, dtype=bool)
        guesses = []
        for step in range(steps):
            if step:
                cache = _with_room(cache, roots)
            visible = jnp.concatenate([causal] + [same] * step, axis=1)
            ahead = shift(tokens, 1 + step)[:, :roots]
            h, cache = self.net.apply(
                params["own"],
                self._embed(params, ahead, h.dtype),
                h,
                cache,
                (jnp.arange(roots) + step)[None],
                visible[None],
            )
            guesses.append(h)
        return jnp.stack(guesses, axis=2)

    def logits(self, params: Params, a: Array, *, reduced: bool = False) -> Array:
        """The draft's logits `[*B, V]` of guesses `[*B, D]`; `reduced`: `[*B, W]`."""
        raise NotImplementedError

    def _raw(self, target: LMOutput) -> tuple[Array, ...]:
        """What it reads of the target's output, arrays of `[B, T, D]`."""
        raise NotImplementedError

    def _fuse(self, params: Params, raw: tuple[Array, ...]) -> Array:
        """One feature `[B, T, D]` of them, in the type of the own parameters."""
        raise NotImplementedError

    def _steps(
        self, params: Params, a: Array, tokens: Array, mask: Array, target: LMOutput
    ) -> dict[str, Array]:
        """Cross-entropies with the target's law, hits and counts, `[K]` each.

        Step s counts at root i if the tokens i + 2 .. i + 2 + s all do (in decoding a
        draft is looked at only behind accepted ones), and if the draft can write what
        the target finds likeliest. The law is that over the ids of the draft's head.
        """
        roots, steps = a.shape[1:3]
        ahead, counted, run = [], [], True
        for step in range(steps):
            ahead.append(shift(target.hidden, 1 + step)[:, :roots])
            run = shift(mask, 2 + step)[:, :roots] & run
            counted.append(run)
        pieces = (a, jnp.stack(ahead, axis=2), jnp.stack(counted, axis=2))
        ids = self.net.config.head

        def one(piece) -> dict[str, Array]:
            a, ahead, counted = piece
            theirs = self._target.unembed(params["target"], ahead, reduced=ids is None)
            theirs = jax.lax.stop_gradient(theirs.astype(jnp.float32))
            log_p, best = jax.nn.log_softmax(theirs), jnp.argmax(theirs, axis=-1)
            if ids is not None:
                best, inside = locate(best, ids.ids)
                log_p, counted = restrict(log_p, ids.ids)[0], counted & inside
            ours = self.logits(params, a, reduced=True).astype(jnp.float32)
            loss = -jnp.sum(jnp.exp(log_p) * jax.nn.log_softmax(ours), axis=-1)
            right = (jnp.argmax(ours, axis=-1) == best) & counted
            return {
                "loss": jnp.sum(jnp.where(counted, loss, 0.0), (0, 1)),
                "agreement": jnp.sum(right, (0, 1), dtype=jnp.int32),
                "tokens": jnp.sum(counted, (0, 1), dtype=jnp.int32),
            }

        size = chunk_size(self.chunk, steps * a.shape[0], roots)
        return sum_chunks(one, pieces, size)

    @property
    def _target(self) -> CausalLM:
        assert self.model is not None, "bind comes first"
        return self.model

    def _embed(self, params: Params, tokens: Array, dtype: Any) -> Array:
        return params["target"]["embed_tokens"][tokens].astype(dtype)

    def _read(
        self, params: Params, tokens: Array, h: Array, cache: KVCache
    ) -> tuple[Array, KVCache]:
        """Reads a chain `tokens [B, T]`, with the feature before each."""
        length = tokens.shape[1]
        return self.net.apply(
            params["own"],
            self._embed(params, tokens, h.dtype),
            h,
            cache,
            cache.length[:, None] + jnp.arange(length)[None, :],
            cache.visible(length, None, None),
        )

    def _chain(self, params, keys, a: Array, cache: KVCache, context: Context):
        """Draws a chain behind the guess `a [B, D]`."""

        def read(token: Array, carry: Params) -> tuple[Array, Params]:
            h, cache = carry
            a, cache = self._read(params, token, h, cache)
            return self.logits(params, a[:, 0]), (a, cache)

        proposal, (_, cache) = draw_chain(
            read,
            keys,
            self.logits(params, a),
            (a[:, None], cache),
            context,
            gamma=self.gamma,
            min_confidence=self.min_confidence,
        )
        return proposal, cache

    def _tree(self, params, a: Array, cache: KVCache, known: Array) -> Proposal:
        """The likeliest tree behind the guess `a [B, D]`."""
        assert self.nodes is not None
        text = cache.length[:, None]
        slot = jnp.arange(cache.capacity)[None, :]

        def read(tokens, guess, number, seen, cache) -> tuple[Array, KVCache]:
            offset = (slot - text)[:, None]  # [B, 1, S], behind the text
            column = jnp.clip(offset, 0, seen.shape[2] - 1)
            column = jnp.broadcast_to(column, (*seen.shape[:2], slot.size))
            branch = jnp.take_along_axis(seen, column, axis=2)
            inside = (offset >= 0) & (offset < seen.shape[2])
            return self.net.apply(
                params["own"],
                self._embed(params, tokens, guess.dtype),
                guess,
                cache,
                jnp.broadcast_to(text + number, tokens.shape),
                (offset < 0) | (inside & branch),
            )

        tokens, parents = grow_tree(
            read,
            lambda a: self.logits(params, a),
            a,
            cache,
            depth=self.gamma,
            top_k=self._width,
            nodes=self.nodes,
        )
        drafted = jnp.where(known, self.nodes, 0).astype(jnp.int32)
        return Proposal.tree(tokens, None, drafted, parents, self.gamma)


def shift(x: Array, by: int) -> Array:
    """`x [B, T, ...]` from `by` positions further on; zeros behind the end."""
    by = min(by, x.shape[1])
    more = [(0, 0)] * x.ndim
    more[1] = (0, by)
    return jnp.pad(x[:, by:], more)


def named_steps(sums: dict[str, Array]) -> dict[str, Array]:
    """Sums `[K]` by name and step: "loss/step_1", ..."""
    named = {}
    for name, values in sums.items():
        for step in range(values.shape[0]):
            value = jax.lax.stop_gradient(values[step])
            named[f"{name}/step_{step + 1}"] = value
    return named


def _at(x: Array, index: Array) -> Array:
    """`x [B, T, D]` at `index [B]`: `[B, D]`."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _with_room(cache: KVCache, slots: int) -> KVCache:
    """The cache with so many slots more, all of its own valid."""

    def grow(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, slots), (0, 0)))

    keys, values = (tuple(map(grow, x)) for x in (cache.keys, cache.values))
    return KVCache(keys, values, cache.length)


def _shapes(own: Params) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(own)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in leaves
    }


def _check_params(bound: OnFeatures, own: Params) -> None:
    """Raises a ValueError unless `own` are parameters of the bound drafter."""
    wanted = _shapes(jax.eval_shape(bound.net.init, jax.random.key(0)))
    found = _shapes(own)
    model, width = bound._target, found.get("fc/kernel", (0,))[-1]
    vocab = found.get("lm_head", (None,))[0] if bound.net.config.head is None else None
    check_sizes(bound.kind, width, vocab, model)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"these parameters are those of other settings: for this {bound.kind} "
                f"and its target {name} has the shape {wanted.get(name, 'of nothing')}"
                f", got {found.get(name, 'nothing')}"
            )

"""What a model, a drafter and a verifier have to offer.

Axes: B rows, T query positions of a call, S cache slots, V vocabulary, D width,
G draft length (gamma; of a tree its depth), M drafts of a round (the nodes of a tree;
of a chain G). The target's law is *p*, the draft's *q*.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core._record import record
from specjax.core._sampling import Sampling

Params = Any  # a pytree of arrays


@record
class LMOutput:
    """What one call of a language model returns beside its cache."""

    logits: Array  # [B, T, V], raw
    hidden: Array  # [B, T, D], what the head reads: after the final norm
    # What `apply` was asked for by name: [B, T, D], or [B, T, heads, H].
    features: dict[str, Array] = dataclasses.field(default_factory=dict)


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model as pure functions over a parameter pytree.

    Implementations are frozen (hashable, comparable), so that they can be static
    arguments of `jax.jit`.
    """

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens, that the model can take."""
        ...

    def init(self, key: Array) -> Params:
        """Draws fresh parameters."""
        ...

    def init_cache(self, batch: int, capacity: int, dtype: Any = None) -> Any:
        """Allocates an empty cache of `capacity` slots for each of `batch` rows."""
        ...

    def apply(
        self,
        params: Params,
        tokens: Array,
        cache: Any = None,
        *,
        positions: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[LMOutput, Any]:
        """Reads `tokens [B, T]` behind what the cache holds.

        One function serves training (`cache=None`), prefill, decoding and verification.

        Args:
            params: the model's parameters.
            tokens: `[B, T]` int32.
            cache: what `init_cache` gave, or None to attend among `tokens` only.
            positions: `[B, T]`; default: the cache's length onwards.
            mask: `[B, T, T]`, which of these tokens each may look at; default causal.

        Returns:
            The output, and the cache T slots longer (None where none came in).
        """
        ...


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Proposal:
    """What a drafter suggests: a tree of M tokens, most often a chain.

    Make one with `Proposal.chain` or `Proposal.tree`. Nodes are numbered 0 .. M-1; a
    node's parent is the node before it in the text, -1 the last committed token.
    Parents come before their children, siblings are tried in the order of their
    numbers. A row may draft fewer than M tokens: nodes at or past `num_drafted` are
    padding, and no verifier accepts them.

    `log_q` is the *exact* law that each token was drawn from, after temperature, top-k,
    top-p and min-p, given its ancestors and its *earlier siblings*:

    - one child a node (a chain): the draft's law there;
    - siblings drawn independently of each other (with replacement): the same law for
      each, so that two of them may be the same token;
    - siblings drawn without replacement: for the i-th the draft's law without the
      tokens of the i-1 before it, normalised again;
    - candidates that were not drawn (top-k, look-up): a point mass each, which is
      what None says for all of them. Never the softmax that they were chosen by.

    None is lossless wherever the tokens come from, but drafts that were drawn stay more
    often with their law. With a law, which nodes there are may depend on tokens drawn
    before them, but what was drawn must stay, whatever it is: to leave out drawn tokens
    that look bad changes the law of those that remain.
    """

    tokens: Array  # [B, M] int32
    log_q: Array | None  # [B, M, V] float32, normalised; None: point masses
    num_drafted: Array  # [B] int32, at most M
    # One tree for all rows: a tuple, known when the program is compiled. A tree of its
    # own for each row and round: an array [B, M] int32.
    parents: tuple[int, ...] | Array
    depth: int  # G, the depth of the tree: nodes that lie deeper are never accepted

    @classmethod
    def chain(
        cls, tokens: Array, log_q: Array | None, num_drafted: Array
    ) -> "Proposal":
        """A proposal in which each draft follows the one before it (M = G)."""
        gamma = tokens.shape[1]
        return cls(tokens, log_q, num_drafted, tuple(range(-1, gamma - 1)), gamma)

    @classmethod
    def tree(
        cls,
        tokens: Array,
        log_q: Array | None,
        num_drafted: Array,
        parents: tuple[int, ...] | Array,
        depth: int,
    ) -> "Proposal":
        """A proposal of a tree.

        Args:
            tokens: `[B, M]` int32.
            log_q: `[B, M, V]` float32, see the class; None for point masses.
            num_drafted: `[B]` int32: nodes from there on are padding.
            parents: the parent of each node, -1 for the last committed token, each
                before its children. A tuple of M (one tree for all rows and rounds:
                `ops.tree_depth` checks it on the host), or `[B, M]` int32.
            depth: G, how deep the tree is: the drafter's `gamma`.

        Example:
            >>> two_chains = Proposal.tree(
            ...     jnp.zeros((1, 4), int), None, jnp.array([4]), (-1, -1, 0, 1), 2)
            >>> two_chains.is_chain
            False
        """
        static = tuple(parents) if isinstance(parents, list | tuple) else parents
        return cls(tokens, log_q, num_drafted, static, depth)

    @property
    def is_chain(self) -> bool:
        """Whether it is known that each draft follows the one before it."""
        chain = tuple(range(-1, self.tokens.shape[1] - 1))
        return isinstance(self.parents, tuple) and self.parents == chain

    def tree_flatten(self):
        """Static parents are structure, an array of parents is a leaf."""
        static = isinstance(self.parents, tuple)
        leaves = (self.tokens, self.log_q, self.num_drafted)
        if static:
            return leaves, (self.parents, self.depth)
        return (*leaves, self.parents), (None, self.depth)

    @classmethod
    def tree_unflatten(cls, structure, leaves) -> "Proposal":
        """The inverse of `tree_flatten`."""
        parents, depth = structure
        tokens, log_q, num_drafted, *dynamic = leaves
        parents = dynamic[0] if parents is None else parents
        return cls(tokens, log_q, num_drafted, parents, depth)


@record
class Verdict:
    """What a verifier decided: the first `num_accepted + 1` of `tokens` are emitted."""

    num_accepted: Array  # [B] int32, 0..G drafts
    tokens: Array  # [B, G+1] int32: accepted drafts, then a correction or bonus token
    # [B, G] int32, the nodes that were accepted, from the root down; behind the first
    # `num_accepted` any node. None for a chain, whose path is 0, 1, 2, ...
    path: Array | None = None


class Verifier(Protocol):
    """Decides which drafts stay. Frozen; holds settings only.

    Two members are optional:

    - `trees: ClassVar[bool]`, whether it verifies trees; left out: chains only.
    - `reads_logits: ClassVar[bool]`, whether it is called with `logits=` as well, the
      target's raw `[B, M+1, V]` (at temperature 0 `log_p` is a point mass, which says
      nothing of the runner-up); left out: no.
    """

    lossless: ClassVar[bool]  # the output follows the target's law, whatever the draft

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """Verifies.

        Args:
            keys: `[B]`, one key a row.
            proposal: what was drafted.
            log_p: `[B, M+1, V]`, the target's law behind the last committed token
                (entry 0) and behind node i (entry i + 1).

        Returns:
            The verdict.
        """
        ...


@record
class Context:
    """What a drafter may look at when it proposes."""

    tokens: Array  # [B, S] int32, prompt and all that was emitted
    length: Array  # [B] int32, how many of them are there, at least 1
    sampling: Sampling
    # The target's cache, to read: it holds all tokens but the last. Whatever lies
    # behind, such as slots that a drafter writes in a copy, the target writes again.
    cache: Any = None
    # [B] bool: rows that have ended go on drafting for nothing, so nothing should wait
    # for them. None: all run.
    running: Array | None = None

    def token_at(self, position: Array) -> Array:
        """The tokens `[B]` or `[B, T]` at absolute positions of that shape."""
        index = position if position.ndim == 2 else position[:, None]
        index = jnp.clip(index, 0, self.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(self.tokens, index, axis=1)
        return tokens if position.ndim == 2 else tokens[:, 0]


@record
class Feedback:
    """What a drafter learns after a round.

    A row that ended in this round keeps fewer tokens than were accepted; whatever its
    state then holds is never looked at.
    """

    length: Array  # [B] int32, tokens now in each row
    num_accepted: Array  # [B] int32, drafts that stayed
    # The target's output on [last token, drafts]: [B, M+1, ...], entry i + 1 of node i.
    target: LMOutput
    # [B, G] int32, the accepted nodes from the root down, then any; a chain's: 0, 1, 2.
    path: Array

    def along_path(self, x: Array) -> Array:
        """`x [B, M+1, ...]` at the last token and the accepted drafts: `[B, G+1, ...]`.

        Entry i of a row is there for i <= `num_accepted`. So they are the target's
        outputs on the tokens at `length - num_accepted - 2` onwards: on all that it
        had not read before, up to the last but one.
        """
        entry = jnp.pad(self.path + 1, ((0, 0), (1, 0)))
        return jax.vmap(lambda row, index: row[index])(x, entry)

    def at_end(self, x: Array) -> Array:
        """`x [B, M+1, ...]` at the last accepted draft (or the last token): `[B, ...]`.

        The newest token of the row was drawn from the target's law there.
        """
        entry = jnp.pad(self.path + 1, ((0, 0), (1, 0)))
        end = jnp.take_along_axis(entry, self.num_accepted[:, None], axis=1)[:, 0]
        return jax.vmap(lambda row, index: row[index])(x, end)


class Drafter(Protocol):
    """Proposes tokens. A frozen dataclass of settings; parameters come as an argument.

    The state is any pytree: `()` for look-up, a cache for a draft model. The loop calls
    `bind` on the host, `init` once behind the target's prefill, and then `propose` and
    `commit` in every round, all three inside one jitted program.

    Four members are optional:

    - `num_nodes: int`, M, the tokens drafted in a round; left out: `gamma`, a chain. A
      drafter of trees must say it, for the target's cache has room for that many.
    - `reach: int`, how deep the deepest node lies that the target reads, padding among
      them; left out: `gamma`. Nodes past `num_drafted` are never accepted, but they are
      read, and `Feedback` has the target's output there: a drafter may have it look
      further ahead in the same pass.
    - `features: tuple[str, ...]`, what it reads of the target beside logits and
      `hidden`, by name (see `models.CausalLM.apply`); they come in `target.features`
      of `init` and of `Feedback`.
    - `catch_up(params, state, context) -> state`: reads what was committed in rounds
      that it was left out of (where `commit` told it of a row that had not grown), at
      least in rows that run. With it a drafter may serve beside another (`Fallback`).
    """

    @property
    def gamma(self) -> int:
        """G, the most drafts that can stay in a round: of a tree its depth."""
        ...

    def bind(self, target: "Checkpoint", max_length: int) -> tuple["Drafter", Params]:
        """Checks the drafter against a target, on the host and before any tracing.

        Args:
            target: the checkpoint that will verify.
            max_length: the most tokens (prompt and new ones) that a row may come to.

        Returns:
            A hashable drafter without arrays, and the parameters to call it with.

        Raises:
            ValueError: it cannot draft for this target; the message says why.
        """
        ...

    def init(
        self,
        params: Params,
        tokens: Array,
        length: Array,
        capacity: int,
        target: LMOutput,
    ) -> Any:
        """Reads the prompts and returns the state.

        Args:
            params: the drafter's.
            tokens: `[B, P]` int32, padded on the right.
            length: `[B]`, at least 1.
            capacity: the most tokens that a row may come to. A cache of the drafter's
                own that takes branches needs slots for them on top.
            target: the target's output on `tokens[:, :-1]` (on the one column of
                prompts of one token): `[B, P-1, ...]`. Entry `length - 2` is the last
                that a row's first round may rest on; none is if `length` is 1.
        """
        ...

    def propose(
        self, params: Params, keys: Array, state: Any, context: Context
    ) -> tuple[Proposal, Any]:
        """Drafts M tokens a row from one key a row, `keys [B]`; see `Proposal`."""
        ...

    def commit(self, params: Params, state: Any, feedback: Feedback) -> Any:
        """Rolls the state back to what was accepted."""
        ...


class TrainableDrafter(Drafter, Protocol):
    """A drafter with parameters of its own, trained beside one target.

    A frozen dataclass of settings, whose field `params` (left out of comparisons) holds
    its own parameters, or None. `bind` refuses one without parameters, or with those
    for a target of another width or vocabulary; what it returns is a hashable drafter
    without arrays, which knows the target's model, and as the parameters

        {"own": the drafter's, "target": those of the target, the same arrays}

    so that heads and embeddings of the target serve the drafter without a copy.

    `features: tuple[str, ...]` names what it reads of the target's pass beside
    `hidden`, in training as in decoding.
    """

    @property
    def features(self) -> tuple[str, ...]:
        """Names for `models.CausalLM.apply`; () where `hidden` is enough."""
        ...

    def init_params(self, key: Array, target: "Checkpoint") -> Params:
        """Fresh parameters of its own (a nested dict of arrays) for this target."""
        ...

    def with_params(self, own: Params) -> "TrainableDrafter":
        """The same drafter, which carries these parameters."""
        ...

    def for_model(self, model: LanguageModel) -> "TrainableDrafter":
        """What `bind` returns for a target of this model: hashable, without arrays."""
        ...

    def loss(
        self, params: Params, keys: Array, tokens: Array, mask: Array, target: LMOutput
    ) -> tuple[Array, dict[str, Array]]:
        """What it has to learn from one micro-batch, called as `for_model` returns it.

        Gradients stop where the caller says: the target's output and parameters come
        stopped if the target is frozen.

        Args:
            params: as from `bind`.
            keys: `[B]`, one a row.
            tokens: `[B, T]` int32, padded on the right.
            mask: `[B, T]`: token i is to be predicted and counts; never column 0.
            target: its output on `tokens`, with `features`.

        Returns:
            The loss `[]` in nats, summed over all that counts, and sums by name, all
            `[]`: "tokens", how many tokens count (the step divides the loss by their
            number in all micro-batches), and what else is worth a column in the
            metrics, which is shown as a mean: "agreement/head_1" is divided by
            "tokens/head_1" where that is among the sums, and else by "tokens".
        """
        ...


class Stateless:
    """`init`, `commit` and `catch_up` of a drafter that keeps nothing."""

    def init(
        self,
        params: Params,
        tokens: Array,
        length: Array,
        capacity: int,
        target: LMOutput,
    ) -> Params:
        """See `Drafter.init`: no state."""
        return ()

    def commit(self, params: Params, state: Params, feedback: Feedback) -> Params:
        """See `Drafter.commit`: nothing to roll back."""
        return state

    def catch_up(self, params: Params, state: Params, context: Context) -> Params:
        """See `Drafter`: nothing was missed."""
        return state


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model with its parameters, tokeniser and configuration: what `load` returns."""

    model: LanguageModel
    params: Params
    tokenizer: Any = None
    config: Any = None
    # Where the end-of-text ids of generation_config.json and the like are kept.
    eos_token_ids: tuple[int, ...] = ()
    source: str = ""
    metadata: Mapping[str, Any] | None = None

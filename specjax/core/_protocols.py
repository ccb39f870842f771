"""What a model, a drafter and a verifier have to offer.

Axes: B rows, T query positions of a call, S cache slots, V vocabulary, D width,
G draft length (gamma). The target's law is *p*, the draft's *q*.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array

from specjax.core._record import record, static_field
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


@record
class Proposal:
    """What a drafter suggests for the next G positions.

    `log_q` is the *exact* law that each token was drawn from, after temperature, top-k,
    top-p and min-p: a one-hot row for a deterministic drafter. A row may draft fewer
    than G tokens: those past `num_drafted` are padding that no verifier accepts.
    """

    tokens: Array  # [B, G] int32
    log_q: Array  # [B, G, V] float32, normalised
    num_drafted: Array  # [B] int32, at most G
    # The parent of each draft, -1 for the last committed token: a chain is 0 -> 1 -> 2.
    parents: tuple[int, ...] = static_field()

    @classmethod
    def chain(cls, tokens: Array, log_q: Array, num_drafted: Array) -> "Proposal":
        """A proposal in which each draft follows the one before it."""
        return cls(tokens, log_q, num_drafted, tuple(range(-1, tokens.shape[1] - 1)))


@record
class Verdict:
    """What a verifier decided: the first `num_accepted + 1` of `tokens` are emitted."""

    num_accepted: Array  # [B] int32, 0..G drafts
    tokens: Array  # [B, G+1] int32: accepted drafts, then a correction or bonus token


class Verifier(Protocol):
    """Decides how many drafts stay. Frozen; holds settings only."""

    lossless: ClassVar[bool]  # the output follows the target's law, whatever the draft

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """Verifies.

        Args:
            keys: `[B]`, one key a row.
            proposal: what was drafted.
            log_p: `[B, G+1, V]`, the target's law before each draft and after the last.

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

    def token_at(self, position: Array) -> Array:
        """The tokens `[B]` or `[B, T]` at absolute positions of that shape."""
        index = position if position.ndim == 2 else position[:, None]
        index = jnp.clip(index, 0, self.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(self.tokens, index, axis=1)
        return tokens if position.ndim == 2 else tokens[:, 0]


@record
class Feedback:
    """What a drafter learns after a round."""

    length: Array  # [B] int32, tokens now in each row
    num_accepted: Array  # [B] int32, drafts that stayed
    target: LMOutput  # the target's output on [last token, drafts]: [B, G+1, ...]


class Drafter(Protocol):
    """Proposes tokens. A frozen dataclass of settings; parameters come as an argument.

    The state is any pytree: `()` for look-up, a cache for a draft model.
    """

    @property
    def gamma(self) -> int:
        """G, the most tokens drafted in a round."""
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

    def init(self, params: Params, tokens: Array, length: Array, capacity: int) -> Any:
        """Reads the prompts `tokens [B, P]` of `length [B]` and returns the state."""
        ...

    def propose(
        self, params: Params, keys: Array, state: Any, context: Context
    ) -> tuple[Proposal, Any]:
        """Drafts G tokens a row from one key a row, `keys [B]`."""
        ...

    def commit(self, params: Params, state: Any, feedback: Feedback) -> Any:
        """Rolls the state back to what was accepted."""
        ...


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

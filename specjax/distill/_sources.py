"""Data policies: which sequences a draft is trained on.

DistillSpec (Zhou et al., arXiv 2310.08461, section 3) studies fixed text, samples of
the target, samples of the draft, and mixtures. GKD (Agarwal et al., arXiv 2306.13649,
algorithm 1) flips a coin of probability lambda for samples of the student.

Rollouts are made inside the jitted step by the loop that serves them later
(`decoding.decode`). They are data: no gradient flows through the sampling.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core import Registry, Sampling
from specjax.decoding import decode
from specjax.distill._mixed_model import mixed_policy
from specjax.distill._response import at, log_law
from specjax.distill._state import Batch, Behaviour, Models, Policy
from specjax.ops import chunk_size, fold, map_chunks

_sources: Registry[Callable[..., "Source"]] = Registry("data source")


def source_names() -> tuple[str, ...]:
    """The registered data policies."""
    return _sources.names()


def get_source(name: str) -> Callable[..., "Source"]:
    """The class registered under `name`; a ValueError lists near names."""
    return _sources.get(name)


class Source(Protocol):
    """Turns a batch of the corpus into the batch to train on. Frozen and hashable."""

    def width(self, width: int) -> int:
        """T of the batches that `draw` returns, for corpus batches of `width`."""
        ...

    def loss_width(self, loss_width: int | None) -> int | None:
        """`Batch.loss_width` of what `draw` returns, for corpus batches of that one."""
        ...

    @property
    def tells_behaviour(self) -> bool:
        """Whether its batches carry a `Behaviour`."""
        ...

    def memory(self) -> Any:
        """What it keeps from step to step, a pytree; `()` for nothing."""
        ...

    def draw(
        self,
        step_key: Array,
        row_keys: Array,
        batch: Batch,
        models: Models,
        memory: Any,
    ) -> tuple[Batch, Any]:
        """Draws the sequences; pure, called inside the jitted step.

        Args:
            step_key: the step's key, the same for all of its micro-batches.
            row_keys: `[B]`, one key a row, whatever the split in micro-batches.
            batch: rows of the corpus.
            models: the student in training, and the target if the run has one.
            memory: as the last call left it.

        Returns:
            The batch to train on, and the memory.
        """
        ...


class _Plain:
    """A source that keeps nothing and gives sequences alone."""

    @property
    def tells_behaviour(self) -> bool:
        """No."""
        return False

    def memory(self) -> Any:
        """Nothing."""
        return ()


@_sources.register("fixed")
@dataclass(frozen=True)
class FixedCorpus(_Plain):
    """The corpus as it is: ground truth, or samples of the target made beforehand."""

    def width(self, width: int) -> int:
        """The corpus's."""
        return width

    def loss_width(self, loss_width: int | None) -> int | None:
        """The corpus's."""
        return loss_width

    def draw(self, step_key, row_keys, batch, models, memory) -> tuple[Batch, Any]:
        """The batch itself."""
        return batch, memory


@dataclass(frozen=True)
class _Rollout(_Plain):
    """Continues each row's prompt. Every new token counts, its end of text too.

    Attributes:
        prompt_size: P, the longest prompt; longer ones are cut to their first P tokens.
        max_new_tokens: the most tokens drawn for a row.
        sampling: how they are drawn.
        eos_ids: ids that end a row.
    """

    prompt_size: int
    max_new_tokens: int
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("prompt_size", "max_new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        object.__setattr__(self, "eos_ids", tuple(self.eos_ids))

    def width(self, width: int) -> int:
        """P + max_new_tokens."""
        return self.prompt_size + self.max_new_tokens

    def loss_width(self, loss_width: int | None) -> int | None:
        """max_new_tokens."""
        return self.max_new_tokens

    def _continue(
        self, writer: Policy, keys: Array, batch: Batch
    ) -> tuple[Batch, Array]:
        """The sequences, and with which log-probability each token was drawn."""
        if batch.tokens.shape[1] < self.prompt_size:
            raise ValueError(
                f"prompt_size must be at most the corpus width {batch.tokens.shape[1]},"
                f" got {self.prompt_size}"
            )
        size = self.width(0)
        prompts = batch.tokens[:, : self.prompt_size]
        prompt_length = jnp.clip(batch.prompt_length, 1, self.prompt_size)
        out = decode(
            writer.model,
            jax.lax.stop_gradient(writer.params),
            prompts,
            prompt_length,
            keys,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            eos_ids=jnp.asarray(self.eos_ids or (-1,), jnp.int32),
        )
        index = jnp.arange(size)[None, :]
        there = index < out.length[:, None]
        # A row without a prompt has nothing to continue: it counts nothing.
        asked = (batch.prompt_length > 0)[:, None]
        drawn = there & (index >= prompt_length[:, None])
        batch = Batch(
            tokens=jnp.where(there, out.tokens, 0),
            mask=drawn & asked,
            prompt_length=prompt_length,
            on_policy=jnp.zeros(prompt_length.shape, bool),
            loss_width=self.max_new_tokens,
        )
        return batch, jnp.where(drawn, out.log_probs, 0.0)


@_sources.register("student")
@dataclass(frozen=True)
class StudentGenerated(_Rollout):
    """On-policy: the draft writes, the target scores (GKD with lambda = 1)."""

    def draw(self, step_key, row_keys, batch, models, memory) -> tuple[Batch, Any]:
        """Samples of the student as it is at this step."""
        drawn, _ = self._continue(models.student, fold(row_keys, 0), batch)
        wrote = jnp.ones_like(drawn.on_policy)
        return dataclasses.replace(drawn, on_policy=wrote), memory


@_sources.register("target")
@dataclass(frozen=True)
class TargetGenerated(_Rollout):
    """The target writes: costs a decoding run of the large model at every step.

    Samples made once and used as a `FixedCorpus` cost less; these are always fresh.
    """

    def draw(self, step_key, row_keys, batch, models, memory) -> tuple[Batch, Any]:
        """Samples of the target."""
        if models.teacher is None:
            raise ValueError("TargetGenerated needs a teacher, got none")
        return self._continue(models.teacher, fold(row_keys, 0), batch)[0], memory


@_sources.register("teacher_mixed")
@dataclass(frozen=True)
class TeacherMixed(_Rollout):
    """Draft and target write together, from alpha p + (1 - alpha) q, for `MiniLLM`.

    The target's share keeps rollouts away from text that the draft likes and the target
    does not know how to judge. Both laws are taken over the ids that both models have.
    `sampling` shapes the mixture; it must leave chance in, as what is drawn gets
    importance weights.

    Attributes:
        alpha: the target's share, in [0, 1). 0 leaves the target out: the tokens of
            `StudentGenerated`, with their probabilities.
        chunk: tokens whose logits are alive at once when the draft reads again what was
            drawn; decoding itself holds those of one position of each row.

    Reference: Gu et al., MiniLLM, arXiv 2306.08543, section 2.2, where alpha is 0.2.
    """

    alpha: float = 0.2
    chunk: int = 1024

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha must be in [0, 1), got {self.alpha}")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {self.chunk}")
        if isinstance(self.sampling.temperature, int | float) and (
            self.sampling.temperature == 0
        ):
            raise ValueError(
                "TeacherMixed weighs its tokens by their probability, which an arg max "
                "does not have: sampling.temperature must be > 0, got 0"
            )

    @property
    def tells_behaviour(self) -> bool:
        """Yes."""
        return True

    def draw(self, step_key, row_keys, batch, models, memory) -> tuple[Batch, Any]:
        """Samples of the mixture, with what mixture and draft thought of each token."""
        if models.teacher is None:
            raise ValueError("TeacherMixed needs a teacher, got none")
        writer = mixed_policy(models.student, models.teacher, self.alpha)
        keys = fold(row_keys, 0)
        drawn, log_prob = self._continue(writer, keys, batch)
        log_q = self._score(models.student, drawn, writer.model.vocab_size)
        return dataclasses.replace(
            drawn,
            on_policy=jnp.ones_like(drawn.on_policy),
            behaviour=Behaviour(log_prob, log_q),
        ), memory

    def _score(self, student: Policy, drawn: Batch, size: int) -> Array:
        """Of each drawn token log q `[B, T]`, over the first `size` ids."""
        model, params = student.model, jax.lax.stop_gradient(student.params)
        hidden = model.apply(params, drawn.tokens)[0].hidden[:, :-1]

        def score(piece) -> Array:
            hidden, labels = piece
            return at(log_law(model.unembed(params, hidden)[..., :size]), labels)

        labels = drawn.tokens[:, 1:]
        at_once = chunk_size(self.chunk, *labels.shape)
        log_q = map_chunks(score, (hidden, labels), at_once)
        return jnp.where(drawn.mask, jnp.pad(log_q, ((0, 0), (1, 0))), 0.0)


@_sources.register("mixture")
@dataclass(frozen=True)
class Mixture:
    """Rows of `other` with probability `fraction` (lambda), of `base` otherwise.

    Attributes:
        base: the source used with probability 1 - fraction.
        other: the source used with probability `fraction`, as a rule the student's.
        fraction: lambda, in [0, 1].
        per: what a coin decides. "step": the whole step, as in GKD; only the source
            that won is run. "row": each row by itself; both sources are run. "split":
            no coin, every micro-batch has the same share of rows, evenly spread, and
            each source is run for its own rows only: the cheapest without variance.

    Coins come from the run's own key (of the step, or of the row), never from the host.
    """

    base: Source
    other: Source
    fraction: float = 0.5
    per: str = "step"

    def __post_init__(self):
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction must be in [0, 1], got {self.fraction}")
        _MIXERS.get(self.per)

    def width(self, width: int) -> int:
        """The wider of the two."""
        return max(self.base.width(width), self.other.width(width))

    def loss_width(self, loss_width: int | None) -> int | None:
        """The larger of the two."""
        both = self.base.loss_width(loss_width), self.other.loss_width(loss_width)
        return None if None in both else max(n for n in both if n is not None)

    @property
    def tells_behaviour(self) -> bool:
        """Whether either does."""
        return self.base.tells_behaviour or self.other.tells_behaviour

    def memory(self) -> Any:
        """Of both."""
        return self.base.memory(), self.other.memory()

    def draw(self, step_key, row_keys, batch, models, memory) -> tuple[Batch, Any]:
        """Draws from one, the other or both."""
        width = self.width(batch.tokens.shape[1])
        loss_width = self.loss_width(batch.loss_width)

        def drawer(index: int) -> Drawer:
            source = (self.base, self.other)[index]
            # Nested mixtures flip coins of their own.
            step_salted = jax.random.fold_in(step_key, index + 1)

            def draw(memory, row_keys: Array, batch: Batch) -> tuple[Batch, Any]:
                keys = fold(row_keys, index + 1)
                drawn, kept = source.draw(
                    step_salted, keys, batch, models, memory[index]
                )
                drawn = _widen(drawn, width, self.tells_behaviour)
                drawn = dataclasses.replace(drawn, loss_width=loss_width)
                return drawn, (*memory[:index], kept, *memory[index + 1 :])

            return draw

        mix = _MIXERS.get(self.per)
        return mix(
            self.fraction, drawer(0), drawer(1), step_key, row_keys, batch, memory
        )


Drawer = Callable[[Any, Array, Batch], tuple[Batch, Any]]
_MIXERS: Registry[Callable[..., tuple[Batch, Any]]] = Registry("mixture (per=)")


@_MIXERS.register("step")
def _mix_step(fraction, base, other, step_key, row_keys, batch, memory):
    coin = jax.random.uniform(jax.random.fold_in(step_key, 0)) < fraction
    return jax.lax.cond(coin, other, base, memory, row_keys, batch)


@_MIXERS.register("row")
def _mix_row(fraction, base, other, step_key, row_keys, batch, memory):
    coins = jax.vmap(jax.random.uniform)(fold(row_keys, 0)) < fraction
    no, memory = base(memory, row_keys, batch)
    yes, memory = other(memory, row_keys, batch)
    return _select(coins, yes, no), memory


@_MIXERS.register("split")
def _mix_split(fraction, base, other, step_key, row_keys, batch, memory):
    share = np.floor(fraction * np.arange(row_keys.shape[0] + 1) + 1e-9)
    chosen = np.flatnonzero(np.diff(share) > 0)
    rest = np.flatnonzero(np.diff(share) == 0)
    parts = []
    for draw, rows in ((other, chosen), (base, rest)):
        if rows.size:
            own = jax.tree.map(lambda x, rows=rows: x[rows], batch)
            part, memory = draw(memory, row_keys[rows], own)
            parts.append(part)
    back = np.argsort(np.concatenate([chosen, rest]))
    return jax.tree.map(lambda *xs: jnp.concatenate(xs)[back], *parts), memory


def _select(rows: Array, yes: Batch, no: Batch) -> Batch:
    def pick(a: Any, b: Any) -> Array:
        return jnp.where(rows.reshape(rows.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, yes, no)


def _widen(batch: Batch, width: int, told: bool) -> Batch:
    """Pads to `width` positions; those count nothing.

    Rows of two sources must agree in what they carry: a text has no behaviour, so it
    gets zeros; a law from disk is left out.
    """

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, width - batch.tokens.shape[1])))

    behaviour = batch.behaviour
    if told and behaviour is None:
        nothing = jnp.zeros(batch.tokens.shape, jnp.float32)
        behaviour = Behaviour(nothing, nothing)
    return dataclasses.replace(
        batch,
        tokens=pad(batch.tokens),
        mask=pad(batch.mask),
        prompt_length=jnp.asarray(batch.prompt_length),
        behaviour=jax.tree.map(pad, behaviour),
        cached=None,
    )

"""EAGLE: one block that carries the target's features on, in its first and third form.

Axes: B rows, T positions, D width, W ids of the draft's head, V vocabulary.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core import Checkpoint, LanguageModel, LMOutput, Params
from specjax.drafters._on_features import OnFeatures, named_steps, shift
from specjax.drafters._registry import registry
from specjax.models import EagleNet, HeadVocabulary


@registry.register("eagle")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(OnFeatures):
    """EAGLE-1: guesses the hidden state that the target's own head reads next.

    The feature f is that hidden state, the head and the embedding are the target's, and
    the loss asks a guess a to be like the feature and to give the target's law:

        SmoothL1(f_{i+1}, a_i) + token_weight * CE(p_{i+1}, q(a_i))

    the first a mean over the width. In training, noise on the features that are read
    makes it bear its own errors: in decoding it reads its guesses.

    With `nodes` it drafts the dynamic tree of EAGLE-2, which needs no other training.

    Attributes:
        noise: features are read with noise that is uniform in [-noise, noise].
        token_weight: of the cross-entropy.

    The other attributes are those of `OnFeatures`: `gamma`, `nodes`, `top_k`,
    `min_confidence`, `chunk`, `params`, `made_for` and `model`.

    Reference: Li et al., EAGLE, arXiv 2401.15077, section 4; EAGLE-2, arXiv 2406.16858.
    The authors' block has no norm before its attention; this one is the target's whole.

    Example:
        >>> Eagle().num_nodes, Eagle(gamma=6, nodes=40, top_k=8).num_nodes
        (5, 40)
    """

    noise: float = 0.1
    token_weight: float = 0.1

    kind: ClassVar[str] = "eagle"

    def __post_init__(self):
        super().__post_init__()
        for name in ("noise", "token_weight"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number >= 0, got {value!r}")

    @property
    def features(self) -> tuple[str, ...]:
        """None: the hidden state that the target's head reads is the feature."""
        return ()

    @property
    def net(self) -> EagleNet:
        """The network for the target that it is bound to."""
        return EagleNet.for_target(self._target.config)

    def init_params(self, key: Array, target: Checkpoint) -> Params:
        """Fresh weights of the network, see `models.EagleNet`."""
        return self.for_model(target.model).net.init(key)

    def logits(self, params: Params, a: Array, *, reduced: bool = False) -> Array:
        """The target's head on guesses `[*B, D]`."""
        dtype = params["target"]["embed_tokens"].dtype
        return self._target.unembed(params["target"], a.astype(dtype), reduced=reduced)

    def loss(
        self, params: Params, keys: Array, tokens: Array, mask: Array, target: LMOutput
    ) -> tuple[Array, dict[str, Array]]:
        """See `TrainableDrafter.loss`, and the class."""
        shape = (tokens.shape[1] - 1, target.hidden.shape[2])

        def draw(key: Array) -> Array:
            return jax.random.uniform(key, shape, minval=-self.noise, maxval=self.noise)

        noise = jax.vmap(draw)(keys) if self.noise else None
        a = self.guess_ahead(params, tokens, target, 1, noise)
        likeness = jnp.mean(_smooth_l1(a[:, :, 0] - shift(target.hidden, 1)[:, :-1]), 2)
        counted = shift(mask, 2)[:, :-1]
        regression = jnp.sum(jnp.where(counted, likeness, 0.0))
        sums = self._steps(params, a, tokens, mask, target)
        total = regression + self.token_weight * sums["loss"][0]
        named = {"tokens": sums["tokens"][0], **named_steps(sums)}
        return total, {**named, "loss/feature": jax.lax.stop_gradient(regression)}

    def _raw(self, target: LMOutput) -> tuple[Array, ...]:
        return (target.hidden,)

    def _fuse(self, params: Params, raw: tuple[Array, ...]) -> Array:
        return raw[0].astype(params["own"]["fc"]["kernel"].dtype)


@registry.register("eagle3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3(OnFeatures):
    """EAGLE-3: fuses features of several depths, and trains on its own guesses.

    Features of low, middle and high layers are fused into one. The guesses need not be
    like it: the loss asks for the target's law alone, several steps long, each of which
    reads the guesses of the one before (the training-time test, `guess_ahead`):

        sum_s decay^s CE(p, q_s),   s = 0 .. unroll - 1

    with p renormalised over the ids that the draft's own head has rows for, where the
    likeliest token is one of them. The head and its norm begin as the target's.

    Attributes:
        layers: the target's layers behind which features are taken; None: behind those
            that the authors take, 2, L / 2 and L - 3 (counted from 1), and of a target
            of less than 8 layers the first, the middle and the last.
        vocabulary: the ids of the draft's head, ascending (`data.frequent_tokens`
            chooses them), or a `models.HeadVocabulary`; None: all of the target's head.
        unroll: K, steps in training (1: features of the target alone).
        decay: see above.
        normalise: EAGLE-3.1: an RMS norm on each feature before they are fused, and the
            head's norm on guesses before they are read again.

    The other attributes are those of `OnFeatures`: `gamma`, `nodes`, `top_k`,
    `min_confidence`, `chunk`, `params`, `made_for` and `model`.

    Reference: Li et al., EAGLE-3, arXiv 2503.01840, section 3. EAGLE-3.1: vLLM, 2026.
    The authors' block has queries, keys and values of width 2D and no fc before it;
    here it is the paper's fc, then the target's kind of block.
    """

    layers: tuple[int, ...] | None = None
    vocabulary: HeadVocabulary | None = None
    unroll: int = 7
    decay: float = 0.8
    normalise: bool = False

    kind: ClassVar[str] = "eagle3"

    def __post_init__(self):
        super().__post_init__()
        steps = self.unroll
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"unroll must be a whole number >= 1, got {steps!r}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay!r}")
        if self.layers is not None:
            object.__setattr__(self, "layers", _as_layers(self.layers))
        if not isinstance(self.vocabulary, HeadVocabulary | None):
            head = HeadVocabulary(self.vocabulary)
            object.__setattr__(self, "vocabulary", head)

    @property
    def features(self) -> tuple[str, ...]:
        """The residual stream behind the chosen layers; known once it is bound."""
        layers = self.layers
        if layers is None:
            layers = _default_layers(self._target.config.num_layers)
        return tuple(f"layers.{n}" for n in layers)

    @property
    def num_ids(self) -> int:
        """W, how many ids the draft can write; of a bound drafter."""
        return self.net.config.head_size

    @property
    def net(self) -> EagleNet:
        """The network for the target that it is bound to."""
        config, vocabulary = self._target.config, self.vocabulary
        vocabulary = config.head if vocabulary is None else vocabulary
        return EagleNet.for_target(
            config, len(self.features), vocabulary, self.normalise
        )

    def for_model(self, model: LanguageModel) -> "Eagle3":
        """See `TrainableDrafter.for_model`; the target must have layers and ids."""
        bound: Eagle3 = super().for_model(model)
        depth, head = bound._target.config.num_layers, bound._target.head
        if self.layers is not None and self.layers[-1] >= depth:
            raise ValueError(
                f"layers must be some of 0..{depth - 1}, those of the target, got "
                f"{self.layers}"
            )
        if self.vocabulary is None:
            return bound
        known = model.vocab_size
        if self.vocabulary.ids[-1] >= known:
            raise ValueError(
                f"the ids of the draft's vocabulary must be below {known}, the "
                f"target's, got {self.vocabulary.ids[-1]}"
            )
        if head is not None and not np.isin(self.vocabulary.ids, head.ids).all():
            raise ValueError(
                "the target never writes some ids of the draft's vocabulary, for its "
                "head is reduced: take ids of target.model.head_ids only"
            )
        return bound

    def init_params(self, key: Array, target: Checkpoint) -> Params:
        """Fresh weights of the network; its head and norm are the target's."""
        bound = self.for_model(target.model)
        own, model = bound.net.init(key), bound._target
        # A head is linear: its value on the unit vectors is its weight [D, V].
        unit = jnp.eye(model.config.hidden_size)
        head = model.unembed(target.params, unit).astype(jnp.float32).T
        ids = bound.net.config.head
        own["lm_head"] = head if ids is None else head[ids.ids]
        scale = target.params["norm"]["scale"]
        own["norm"] = {"scale": jnp.array(scale, jnp.float32)}
        return own

    def logits(self, params: Params, a: Array, *, reduced: bool = False) -> Array:
        """The draft's own norm and head on guesses `[*B, D]`."""
        return self.net.unembed(params["own"], a, reduced=reduced)

    def loss(
        self, params: Params, keys: Array, tokens: Array, mask: Array, target: LMOutput
    ) -> tuple[Array, dict[str, Array]]:
        """See `TrainableDrafter.loss`, and the class. Divided by the tokens of step 1.

        Nothing is drawn.
        """
        a = self.guess_ahead(params, tokens, target, self.unroll)
        sums = self._steps(params, a, tokens, mask, target)
        weights = self.decay ** np.arange(self.unroll, dtype=np.float32)
        named = {"tokens": sums["tokens"][0], **named_steps(sums)}
        return jnp.sum(sums["loss"] * weights), named

    def _raw(self, target: LMOutput) -> tuple[Array, ...]:
        return tuple(target.features[name] for name in self.features)

    def _fuse(self, params: Params, raw: tuple[Array, ...]) -> Array:
        own = params["own"]
        dtype = own["fc"]["kernel"].dtype
        return self.net.fuse(own, tuple(x.astype(dtype) for x in raw))


def _as_layers(layers: Any) -> tuple[int, ...]:
    """Numbers of layers, checked as far as they can be without a target."""
    given = layers if isinstance(layers, list | tuple | range) else (layers,)
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in given)
    if not given or not whole or min(given) < 0 or list(given) != sorted({*given}):
        raise ValueError(
            "layers must be numbers of the target's layers, ascending from 0, at least "
            f"one and none twice, got {layers!r}"
        )
    return tuple(given)


def _default_layers(depth: int) -> tuple[int, ...]:
    """See `Eagle3.layers`."""
    if depth >= 8:
        return 1, depth // 2 - 1, depth - 4
    return tuple(sorted({0, (depth - 1) // 2, depth - 1}))


def _smooth_l1(x: Array) -> Array:
    """Huber's loss with its corner at 1."""
    size = jnp.abs(x)
    return jnp.where(size < 1, 0.5 * x * x, size - 0.5)

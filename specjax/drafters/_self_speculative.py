"""Some layers of the target draft for all of them: no second model."""

import dataclasses

from jax import Array

from specjax.core import Checkpoint, Context, KVCache, Params, Proposal, Stateless
from specjax.drafters._chain import draw_chain, require_confidence
from specjax.drafters._registry import registry, require_gamma
from specjax.models import CausalLM, pick_layers


@registry.register("self_speculative")
@dataclasses.dataclass(frozen=True)
class SelfSpeculative(Stateless):
    """Drafts with some of the target's own layers, its embedding, norm and head.

    Parameters are the target's, not a copy. So is the cache: layer i of the draft reads
    what the target's layer i wrote for all committed tokens, and has nothing to read
    again or to roll back. Only the drafts' own slots are written by the draft, in a
    copy that ends with the round.

    With an early exit those keys and values are exactly what the first layers alone
    would have written. Where layers are left out between others they are not: above the
    gap, the draft's hidden states meet keys and values of the whole model. That is what
    both papers do, and any q is lossless as long as it is the law drawn from.

    Which layers do well is for a measurement to say. Untrained, the last ones of a
    model are hard to do without: LayerSkip trains them for it.

    Attributes:
        layers: which of the target's layers draft, ascending from 0.
        early_exit: the first so many layers draft; this or `layers`, not both.
        gamma: G, tokens drafted in a round, with `min_confidence` the most.
        min_confidence: as in `TwoModel`: where to stop drafting.
        model: the draft (set by `bind`).

    Reference: Zhang et al., Draft & Verify, arXiv 2309.08168 (skipped layers, and the
    confidence to go on); Elhoushi et al., LayerSkip, arXiv 2404.16710, section 3.3
    (early exit, shared cache).
    """

    layers: tuple[int, ...] | None = None
    early_exit: int | None = None
    gamma: int = 5
    min_confidence: float | None = None
    model: CausalLM | None = None

    def __post_init__(self):
        require_gamma(self.gamma)
        require_confidence(self.min_confidence)
        if (self.layers is None) == (self.early_exit is None):
            raise ValueError(
                "SelfSpeculative needs either layers, the numbers of those that draft, "
                f"or early_exit, how many of the first ones do, got {self.layers} and "
                f"{self.early_exit}"
            )
        for name in ("layers", "early_exit"):
            given = getattr(self, name)
            numbers = given if isinstance(given, list | tuple | range) else (given,)
            fits = isinstance(given, int) == (name == "early_exit")
            if given is not None and not (fits and all(map(_is_whole, numbers))):
                raise ValueError(
                    "SelfSpeculative takes layers=(0, 2, ...) or early_exit=4, whole "
                    f"numbers, got {name}={given!r}"
                )
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))

    def bind(
        self, target: Checkpoint, max_length: int
    ) -> tuple["SelfSpeculative", Params]:
        """See `Drafter.bind`: the target must be made of layers, these among them."""
        if not isinstance(target.model, CausalLM):
            raise ValueError(
                "SelfSpeculative drafts with layers of the target, so the target must "
                f"be a models.CausalLM, got a {type(target.model).__name__}"
            )
        chosen = self._chosen(target.model.config.num_layers)
        config, params = pick_layers(target.model.config, target.params, chosen)
        return dataclasses.replace(
            self, layers=chosen, early_exit=None, model=CausalLM(config)
        ), params

    def propose(
        self, params: Params, keys: Array, state: Params, context: Context
    ) -> tuple[Proposal, Params]:
        """Draws up to G tokens, a pass of one token each."""
        assert self.model is not None and self.layers is not None, "bind comes first"
        model, whole = self.model, context.cache

        def read(tokens: Array, cache: Params) -> tuple[Array, Params]:
            out, cache = model.apply(params, tokens, cache)
            return out.logits[:, -1], cache

        cache = KVCache(
            tuple(whole.keys[layer] for layer in self.layers),
            tuple(whole.values[layer] for layer in self.layers),
            whole.length,
        )
        last = context.token_at(context.length - 1)
        first, cache = read(last[:, None], cache)
        proposal, _ = draw_chain(
            read,
            keys,
            first,
            cache,
            context,
            gamma=self.gamma,
            min_confidence=self.min_confidence,
        )
        return proposal, state

    def _chosen(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target of so many; refuses those that it lacks."""
        if self.early_exit is not None:
            if not 1 <= self.early_exit <= num_layers:
                raise ValueError(
                    f"early_exit must be 1..{num_layers}, for the target has "
                    f"{num_layers} layers, got {self.early_exit!r}"
                )
            return tuple(range(self.early_exit))
        chosen = self.layers or ()
        if list(chosen) != sorted({*chosen}):
            raise ValueError(
                f"layers must ascend, and none come twice, got {self.layers}"
            )
        return chosen


def _is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

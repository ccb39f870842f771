"""Who drafts in `experiments.drafters`, and how each comes to be: one function each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from experiments._corpus import Corpus
from experiments._stages import Run
from specjax import data, drafters
from specjax.core import Checkpoint, Drafter, Params, TrainableDrafter
from specjax.models import HeadVocabulary

if TYPE_CHECKING:
    from experiments._drafters_config import Contest


@dataclasses.dataclass(frozen=True)
class Scene:
    """What all of them get alike."""

    contest: Contest
    stages: Run
    target: Checkpoint
    corpus: Corpus  # text that the target wrote


@dataclasses.dataclass(frozen=True)
class Made:
    """A drafter, and what it took."""

    drafter: Drafter
    parameters: int = 0  # of its own
    steps: int = 0
    seconds: float = 0.0


def prompt_lookup(scene: Scene) -> Made:
    """The longest n-gram that came before; nothing to train."""
    return Made(drafters.PromptLookup(gamma=scene.contest.gamma))


def two_model(scene: Scene) -> Made:
    """The pair's draft, distilled as `base.distill` says, on the text of all."""
    stages, ask = scene.stages, scene.contest
    start = stages.standard_draft(scene.target)
    start = stages.reduced(start, scene.target, scene.corpus)
    trained = stages.fit(
        "two_model",
        start,
        scene.corpus,
        ask.train,
        stages.config.distill.resolve(),
        teacher=scene.target,
    )
    return Made(
        drafters.TwoModel(trained.checkpoint, gamma=ask.gamma),
        _count(trained.checkpoint.params),
        trained.steps,
        trained.seconds,
    )


def fallback(scene: Scene) -> Made:
    """Look-up where it matches, the distilled draft elsewhere."""
    model = two_model(scene)
    pair = drafters.Fallback(prompt_lookup(scene).drafter, model.drafter)
    return dataclasses.replace(model, drafter=pair)


def self_speculative(scene: Scene) -> Made:
    """The target's own first layers, as they are."""
    ask = scene.contest
    return Made(drafters.SelfSpeculative(early_exit=ask.exit_layers, gamma=ask.gamma))


def lookahead(scene: Scene) -> Made:
    """N-grams that the target guessed; nothing to train."""
    ask = scene.contest
    return Made(
        drafters.Lookahead(window=ask.window, level=ask.gamma + 1, guesses=ask.window)
    )


def medusa(scene: Scene) -> Made:
    """A head for each token ahead, on the frozen target (Medusa-1).

    The tree is the best one of so many nodes by what the heads get right on the text.
    """
    ask, stages, target = scene.contest, scene.stages, scene.target
    # A chain until it is known which tree is best.
    heads = drafters.Medusa(num_heads=ask.gamma, tree=(1,) * ask.gamma)
    heads, result = stages.fit_drafter("medusa", heads, target, scene.corpus, ask.train)
    tree = drafters.sparse_tree(_accuracies(scene, heads), ask.nodes)
    return _trained(scene, "medusa", dataclasses.replace(heads, tree=tree), result)


def eagle(scene: Scene) -> Made:
    """The target's last features carried on, drafted as EAGLE-2's dynamic tree."""
    return _fit(scene, "eagle", drafters.Eagle(**_dynamic_tree(scene)))


def eagle3(scene: Scene) -> Made:
    """Features of three depths, trained on its own guesses, the same tree."""
    target, size = scene.target, scene.stages.config.draft.vocab_size
    ids = None
    if size is not None:
        counts = scene.corpus.sequences.counts(target.model.vocab_size)
        ids = HeadVocabulary(data.frequent_tokens(counts, size).ids)
    draft = drafters.Eagle3(vocabulary=ids, unroll=3, **_dynamic_tree(scene))
    return _fit(scene, "eagle3", draft)


def _dynamic_tree(scene: Scene) -> dict[str, Any]:
    ask = scene.contest
    return {"gamma": ask.gamma, "nodes": ask.nodes, "top_k": ask.top_k}


def _fit(scene: Scene, name: str, drafter: TrainableDrafter) -> Made:
    """Trains it on the text of all, and keeps it."""
    drafter, result = scene.stages.fit_drafter(
        name, drafter, scene.target, scene.corpus, scene.contest.train
    )
    return _trained(scene, name, drafter, result)


def _accuracies(scene: Scene, heads: drafters.Medusa) -> list[list[float]]:
    """How often the i-th best token of each head is right, on a part of the text."""
    target, best = scene.target, min(scene.contest.nodes, scene.target.model.vocab_size)
    bound, params = heads.bind(target, target.model.max_length)

    @jax.jit
    def ranks(params, tokens, mask):
        out, _ = target.model.apply(params["target"], tokens)
        return bound.ranks(params, tokens, mask, out, best)

    text = scene.corpus.sequences
    rows = np.linspace(0, len(text.tokens) - 1, 64).astype(int).reshape(-1, 8)
    counts = [ranks(params, b.tokens, b.mask) for b in map(text.batch, rows)]
    hits, of = (np.sum([np.asarray(c[i]) for c in counts], axis=0) for i in (0, 1))
    return (hits / np.maximum(of, 1)[:, None]).tolist()


def _trained(scene: Scene, name: str, drafter, result) -> Made:
    """A trained drafter, kept in the workdir."""
    drafters.save(drafter, scene.stages.workdir / "drafters" / name, scene.target)
    steps = int(result.state.step)
    return Made(drafter, _count(drafter.params), steps, result.seconds)


def _count(params: Params) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


CONTESTANTS: dict[str, Callable[[Scene], Made]] = {
    make.__name__: make
    for make in (
        two_model,
        prompt_lookup,
        fallback,
        self_speculative,
        lookahead,
        medusa,
        eagle,
        eagle3,
    )
}

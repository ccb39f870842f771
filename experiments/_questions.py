"""Questions with their categories, as token ids to go on from."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments._corpus import Corpus
from specjax import data
from specjax.core import Checkpoint


@dataclasses.dataclass(frozen=True)
class Questions:
    """Prompts and what each is about."""

    prompts: list[list[int]]
    categories: list[str]  # one a prompt


def held_out(corpus: Corpus, each: int) -> Questions:
    """Held-out prompts of the pair's own corpus, all of one category."""
    prompts = corpus.held_out_prompts[:each]
    return Questions(prompts, ["held-out"] * len(prompts))


def load_questions(sources: Sequence[str]) -> dict[str, list[data.Prompt]]:
    """The questions of files or data sets, as `data.load_prompts` reads them."""
    return {source: data.load_prompts(source) for source in sources}


def encode_questions(
    asked: Mapping[str, Sequence[data.Prompt]],
    target: Checkpoint,
    each: int,
    longest: int,
) -> Questions:
    """The first questions of every category.

    Args:
        asked: from `load_questions`; what has no category has its source's name for
            one.
        target: whose tokeniser and chat template they are encoded with.
        each: questions of a category.
        longest: tokens; longer prompts are passed over.

    Raises:
        ValueError: no prompt is short enough.
    """
    chosen: dict[str, list[list[int]]] = defaultdict(list)
    for source, questions in asked.items():
        for prompt in questions:
            found = chosen[prompt.category or Path(source).stem]
            if len(found) < each:
                [ids] = data.chat_prompts(target.tokenizer, [prompt]).tokens
                found += [ids] if len(ids) <= longest else []
    prompts = [(p, name) for name, found in chosen.items() for p in found]
    if not prompts:
        raise ValueError(
            f"{', '.join(asked)} hold no question of at most {longest} tokens; raise "
            "contest.longest, or choose other questions"
        )
    return Questions([p for p, _ in prompts], [name for _, name in prompts])

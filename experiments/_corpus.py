"""What a run reads: training sequences and held-out prompts."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.progress import Progress

from experiments._distillspec_config import Config
from specjax import data
from specjax.core import Checkpoint
from specjax.distill import Batch, Batches, sample_target


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Training sequences, padded on the right."""

    tokens: np.ndarray  # [N, T]
    length: np.ndarray  # [N]
    prompt_length: np.ndarray  # [N], where a rollout takes over
    loss_from: int | None  # the first position in the loss; None: behind the prompt

    def batches(self, batch_size: int, seed: int) -> Batches:
        """All rows, in an order of their own for each epoch."""
        return Batches(self.batch(np.arange(len(self.tokens))), batch_size, seed)

    def batch(self, rows: np.ndarray) -> Batch:
        """The rows as a batch."""
        tokens, length = self.tokens[rows], self.length[rows]
        mask = None
        if self.loss_from is not None:
            mask = np.broadcast_to(
                np.arange(tokens.shape[1]) >= self.loss_from, tokens.shape
            )
        return Batch.of(
            tokens, length=length, prompt_length=self.prompt_length[rows], mask=mask
        )


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training sequences (once they exist) and prompts that are never trained on."""

    train: Sequences | None
    held_out_text: Sequences | None  # of a corpus: to measure cross-entropy on
    train_prompts: list[list[int]]
    held_out_prompts: list[list[int]]

    @property
    def sequences(self) -> Sequences:
        """The training sequences, once they exist."""
        assert self.train is not None, "the target's samples were not drawn yet"
        return self.train


def read_text(config: Config, tokenizer, documents=None) -> Corpus:
    """The standard library, packed; held-out prompts are cut from held-out files."""
    settings = config.data
    documents = documents or data.standard_library(settings.max_chars)
    train, held_out = data.split(documents, settings.held_out)
    eos = tokenizer.eos_token_id
    packed = [
        data.pack(data.encode(tokenizer, [d.text for d in part]), settings.length, eos)
        for part in (train, held_out)
    ]
    train_rows, held_out_rows = (_whole(x, settings.prompt_length) for x in packed)
    size = config.eval.prompt_length
    wanted = max(config.eval.prompts, config.eval.lossless_prompts)
    if len(held_out_rows.tokens) < 2 * wanted:
        raise ValueError(
            f"{wanted} held-out prompts need {2 * wanted} held-out sequences, got "
            f"{len(held_out_rows.tokens)}; raise data.held_out or ask for fewer prompts"
        )
    # Evenly spread over the held-out files.
    chosen = np.linspace(0, len(held_out_rows.tokens) - 1, wanted).astype(int)
    prompts = held_out_rows.tokens[chosen, :size].tolist()
    return Corpus(train_rows, held_out_rows, [], prompts)


def read_prompts(config: Config, tokenizer) -> Corpus:
    """Prompts; a share of them, or a split that the source has, is held out."""
    settings = config.data
    assert settings.prompts is not None
    if settings.prompts == "packaged":
        train = data.packaged_prompts("train")
        held_out = data.packaged_prompts("eval")
    else:
        prompts = data.load_prompts(settings.prompts, field=settings.field)
        share = max(settings.held_out, 1 / len(prompts))
        held_out = [p for p in prompts if _position(p.text) < share] or prompts[-1:]
        train = [p for p in prompts if p not in held_out]
        if not train:
            raise ValueError(
                f"{settings.prompts} holds {len(prompts)} prompts, too few to train on "
                "some and hold out others"
            )
    encode = data.chat_prompts if settings.chat else data.text_prompts
    kept = [
        encode(tokenizer, part, max_length=settings.prompt_length, overlong="drop")
        for part in (train, held_out)
    ]
    for part in kept:
        if part.num_dropped:
            print(
                f"{part.num_dropped} prompts longer than data.prompt_length="
                f"{settings.prompt_length} tokens were left out"
            )
    return Corpus(None, None, kept[0].tokens, kept[1].tokens)


def target_samples(
    target: Checkpoint,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    batch_size: int,
    seed: int,
    folder: Path,
    progress: Progress,
    label: str,
) -> Sequences:
    """Answers drawn from the target at temperature 1, kept on disk (`sample_target`).

    Args:
        target: who answers.
        prompts: token ids; the same prompt may stand there several times.
        length: T, prompt and answer together.
        batch_size: rows decoded together.
        seed: of the first row.
        folder: where finished shards are; those are not drawn again.
        progress: a bar is added to it.
        label: of the bar.
    """
    task = progress.add_task(label, total=len(prompts))
    samples = sample_target(
        target,
        prompts,
        folder,
        length=length,
        seed=seed,
        batch_size=batch_size,
        progress=lambda done, _: progress.update(task, completed=done),
    )
    progress.update(task, completed=len(prompts))
    return Sequences(samples.tokens, samples.length, samples.prompt_length, None)


def _whole(tokens: np.ndarray, prompt_length: int) -> Sequences:
    """Packed text: every token counts, a rollout continues the first few."""
    rows, width = tokens.shape
    return Sequences(
        tokens,
        np.full((rows,), width, np.int32),
        np.full((rows,), prompt_length, np.int32),
        loss_from=1,
    )


def _position(text: str) -> float:
    """A number in [0, 1) that depends on the text only."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12

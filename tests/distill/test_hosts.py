"""Two processes train what one trains."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax import distill
from specjax.distill import Batch, Batches
from tests.distill.test_mesh import quick_flags

pytestmark = pytest.mark.full

HERE = Path(__file__).parent

CODE = """
    import os, signal, sys
    from specjax import parallel
    address, process, folder = sys.argv[3], int(sys.argv[4]), sys.argv[5]
    parallel.initialize(address, 2, process)
    parallel.initialize(address, 2, process)  # again: nothing happens
    try:
        parallel.initialize(address, 3, process)
    except ValueError as error:
        assert "joined a run already" in str(error), error
    else:
        raise AssertionError

    import jax, numpy as np
    sys.path[:0] = sys.argv[1:3]
    from tests.distill import test_hosts as job
    from specjax import distill

    assert jax.process_count() == 2 and len(jax.devices()) == 4
    assert parallel.is_first() == (process == 0)
    mesh = parallel.make_mesh(data=1, fsdp=4)

    def bits(state):
        leaves = (state.params, state.opt_state, state.step)
        return [x.tobytes() for x in jax.tree.leaves(parallel.gather(leaves))]

    straight = job.run(4, f"{folder}/straight", mesh=mesh, save_every=2)
    kernel = straight.state.params["layers_0"]["mlp"]["up_proj"]["kernel"]
    assert not kernel.is_fully_addressable  # each process has a part of it
    job.run(2, f"{folder}/halves", mesh=mesh)
    halves = job.run(4, f"{folder}/halves", mesh=mesh)
    assert bits(straight.state) == bits(halves.state)

    # One process is interrupted; both stop after the same step, and save it.
    batches = job.batches()
    def batch(step):
        if step == 1 and process == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return batches(step)
    interrupting = distill.BatchFunction(batch, batches.describe())
    try:
        job.run(4, f"{folder}/stopped", mesh=mesh, batches=interrupting)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("not stopped")
    with distill.Checkpoints(f"{folder}/stopped/checkpoints/train") as checkpoints:
        assert checkpoints.latest == 2
    try:
        job.run(4, f"{folder}/alone")
    except ValueError as error:
        assert "2 processes train together on a mesh" in str(error), error
    else:
        raise AssertionError

    params = jax.tree.leaves(parallel.gather(straight.state.params))
    if process == 0:
        np.savez(f"{folder}/params.npz", *params)
"""


def batches():
    rng = np.random.default_rng(0)
    corpus = Batch.of(
        rng.integers(0, 16, (12, 10)), length=[3, 10, 8, 10] * 3, prompt_length=2
    )
    return Batches(corpus, batch_size=8, seed=1)


def run(steps, folder, **options):
    """The same run, whoever takes part in it."""
    from tests.distill.conftest import language_model

    draft, target = (language_model(vocab_size=16) for _ in range(2))
    rng = np.random.default_rng(1)

    def params():
        shapes = jax.eval_shape(draft.init, jax.random.key(0))
        return jax.tree.map(
            lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes
        )

    step = distill.TrainStep(
        draft,
        distill.Distill(),
        distill.make_optimizer("adamw", learning_rate=1e-2),
        teacher=target,
        accumulate=2,
    )
    options = dict(batches=batches(), log_every=1) | options
    return distill.train(
        step,
        step.init(jax.random.key(0), params()),
        options.pop("batches"),
        steps=steps,
        teacher_params=params(),
        workdir=folder,
        **options,
    )


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_two_processes_equal_one(tmp_path):
    address = f"localhost:{free_port()}"
    flags = f"--xla_force_host_platform_device_count=2 {quick_flags()}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(CODE)]
    command += [str(HERE), str(HERE.parents[1]), address]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(number), str(tmp_path)],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for number in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)  # of no effect where all is well
        alone = run(4, tmp_path / "alone", progress=False)
        errors = [process.communicate(timeout=300)[1] for process in processes]
    for process, said in zip(processes, errors, strict=True):
        assert process.returncode == 0, said[-4000:]

    with np.load(tmp_path / "params.npz") as file:
        together = [file[name] for name in file.files]
    for a, b in zip(jax.tree.leaves(alone.state.params), together, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    one, two = (
        distill.read_metrics(tmp_path / name / "metrics.jsonl")
        for name in ("alone", "straight")
    )
    assert [line["step"] for line in two] == [1, 2, 3, 4]  # written once
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["tokens"] == a["tokens"]
    assert ["4/4" in said for said in errors] == [True, False]  # one bar

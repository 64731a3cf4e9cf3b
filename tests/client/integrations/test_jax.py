"""JAX: global arrays hold the plan's rows, whatever the mesh, in processes that have no torch."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.client.integrations.ranks import PLAN, ROWS, SEQ_LEN
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import Fault, ReferenceServer
from tests.serving import ROOT

pytest.importorskip("jax", reason="jax is not installed here")

NUM_STEPS = 13


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train from a step to another; return what this process's devices held, the losses and the state."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from corpus_client import ArrayLoader
    from corpus_client.integrations.jax import device_batches, process_place

    if job["num_processes"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(job["coordinator"], job["num_processes"], job["process"])
    mesh = jax.make_mesh(job["mesh"], ("data", "other"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = [tuple(axes) if isinstance(axes, list) else axes for axes in job["spec"]]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    everywhere = NamedSharding(mesh, PartitionSpec())

    @partial(jax.jit, out_shardings=everywhere)
    def step(table: jax.Array, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss_of(table: jax.Array) -> jax.Array:
            return jnp.mean((table[inputs % 64] - targets / 2**16) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(table)
        return table - gradient, loss

    table = jax.device_put(np.array(job["table"], np.float32), everywhere)
    seen: list[Any] = []
    losses: list[float] = []
    state = None
    plan: dict[str, Any] = {**PLAN, **process_place(sharding)}
    with ArrayLoader(job["url"], num_steps=NUM_STEPS, **plan) as loader:
        if job["state"] is not None:
            loader.load_state_dict(job["state"])
        for batch in device_batches(loader, sharding):
            table, loss = step(table, *batch)
            losses.append(float(loss))
            for name in ("inputs", "targets"):
                for shard in getattr(batch, name).addressable_shards:
                    at = [
                        part.indices(size)[0] for part, size in zip(shard.index, (ROWS, SEQ_LEN), strict=True)
                    ]
                    seen.append([batch.step, name, at, np.asarray(shard.data).tolist()])
            state = batch.state_after()
            if batch.step == job["stop"]:
                break
        after = loader.step
    return {
        "seen": seen,
        "losses": losses,
        "table": np.asarray(table).tolist(),
        "state": state,
        "loader_step": after,
        "torch": "torch" in sys.modules,
    }


def run(server: ReferenceServer, num_processes: int, devices: int, **changes: Any) -> list[dict[str, Any]]:
    """Train in processes of several CPU devices each."""
    with socket.socket() as reserved:
        # gRPC binds with SO_REUSEPORT, too, so the port stays taken for others until it listens.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        job = {
            "url": server.url,
            "coordinator": f"127.0.0.1:{reserved.getsockname()[1]}",
            "num_processes": num_processes,
            "mesh": (num_processes * devices, 1),
            "spec": ["data"],
            "table": [0.0] * 64,
            "state": None,
            "stop": None,
            **changes,
        }
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")]),
        }
        command = [sys.executable, "-m", "tests.client.integrations.test_jax"]
        running = [
            subprocess.Popen(
                [*command, json.dumps({**job, "process": process})],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in range(num_processes)
        ]
        done = [each.communicate() for each in running]
    for each, (_, log) in zip(running, done, strict=True):
        assert each.returncode == 0, log
    return [json.loads(response.splitlines()[-1]) for response, _ in done]


def check(corpus: ReferenceCorpus, plan: dict[str, Any], found: list[dict[str, Any]], steps: range) -> None:
    """Each process's arrays are windows of the plan; together they are whole steps, in order."""
    covered = {
        (step, name): np.zeros((ROWS, SEQ_LEN), bool) for step in steps for name in ("inputs", "targets")
    }
    for process in found:
        assert not process["torch"]
        assert list(dict.fromkeys(step for step, *_ in process["seen"])) == list(steps)
        for step, name, (row, column), values in process["seen"]:
            window = tokens_of_step(corpus, plan, step)
            whole = window[:, :-1] if name == "inputs" else window[:, 1:]
            part = (slice(row, row + len(values)), slice(column, column + len(values[0])))
            assert whole[part].tolist() == values
            covered[step, name][part] = True
    assert all(each.all() for each in covered.values())


def plan_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    return found[0]["state"]["plan"]


def test_an_interrupted_run_goes_on_exactly_on_other_devices_and_processes(
    corpus: ReferenceCorpus, server: ReferenceServer
) -> None:
    whole = run(server, 1, 2)
    check(corpus, plan_of(whole), whole, range(NUM_STEPS))
    stop = random.Random(11).randrange(1, NUM_STEPS - 2)
    begun = run(server, 2, 1, stop=stop)
    check(corpus, plan_of(whole), begun, range(stop + 1))
    assert begun[0]["state"]["next_step"] == stop + 1
    assert {process["loader_step"] for process in begun} == {stop + 1}
    ended = run(server, 1, 3, state=begun[0]["state"], table=begun[0]["table"])
    check(corpus, plan_of(whole), ended, range(stop + 1, NUM_STEPS))
    losses = [*begun[0]["losses"], *ended[0]["losses"]]
    assert losses == pytest.approx(whole[0]["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        ((2, 2), ["data", "other"]),  # rows over one axis, the sequence over the other
        ((2, 2), [None, "other"]),  # every device has all rows
        ((2, 2), [["data", "other"]]),  # rows over both
        ((4, 1), []),  # replicated
    ],
    ids=["context", "columns", "both", "replicated"],
)
def test_a_mesh_divides_rows_and_columns_as_it_says(
    corpus: ReferenceCorpus, server: ReferenceServer, mesh: tuple[int, int], spec: list[Any]
) -> None:
    found = run(server, 1, 4, mesh=mesh, spec=spec, stop=2)
    check(corpus, plan_of(found), found, range(3))


def test_processes_that_need_the_same_rows_ask_for_the_same_rows(
    corpus: ReferenceCorpus, server: ReferenceServer
) -> None:
    server.paths.clear()
    found = run(server, 2, 1, mesh=(1, 2), spec=["data", "other"], stop=2)
    check(corpus, plan_of(found), found, range(3))
    batches = [path for path in server.paths if "/v1/batches" in path]
    assert batches
    assert all("world_size=1" in path for path in batches)


def test_a_broken_response_is_asked_for_again(corpus: ReferenceCorpus, server: ReferenceServer) -> None:
    faults = iter([Fault("checksum"), Fault("cut", 40), Fault("reset"), Fault("flip", 8)])
    server.next_fault = lambda: next(faults, None)
    try:
        found = run(server, 1, 1, stop=5)
    finally:
        server.next_fault = lambda: None
    assert next(faults, None) is None
    check(corpus, plan_of(found), found, range(6))


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))

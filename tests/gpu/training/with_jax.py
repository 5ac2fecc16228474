"""A program in JAX: with_jax.py STEPS PAD_MIB [boundary] [pace=SECONDS] [digest=STEPS].

Every loss is printed bit for bit, and digests of all of it, as in mixed.py. It knows nothing of hegm and has no agent,
unless it is to say itself where a batch ends.
"""

import contextlib
import os
import sys
import threading

# The algorithms are fixed then, so that every run sums in the same order.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp

hegm = None
if "boundary" in sys.argv:
    with contextlib.suppress(ImportError):  # undisturbed
        import hegm

steps, pad_mib = int(sys.argv[1]), int(sys.argv[2])
given = dict(trait.split("=") for trait in sys.argv[3:] if "=" in trait)
pace_s, digest_every = float(given.get("pace", 0)), int(given.get("digest", steps))
key = jax.random.key(7)
pad = jax.random.bits(key, (pad_mib << 18,), dtype=jnp.uint32)
weights = {"in": jax.random.normal(key, (512, 1024)) * 0.05, "out": jax.random.normal(key, (1024, 10)) * 0.05}
inputs = jax.random.normal(jax.random.key(1), (256, 512))
labels = jax.random.randint(jax.random.key(2), (256,), 0, 10)


def loss_of(weights, inputs, labels):
    logits = jax.nn.relu(inputs @ weights["in"]) @ weights["out"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


@jax.jit
def step(weights, inputs, labels):
    loss, gradients = jax.value_and_grad(loss_of)(weights, inputs, labels)
    return loss, jax.tree.map(lambda weight, gradient: weight - 0.01 * gradient, weights, gradients)


@jax.jit
def digest(pad, weights):
    return jnp.sum(pad), jax.tree.map(jnp.sum, weights)


pause = threading.Event()
for count in range(steps):
    loss, weights = step(weights, inputs, labels)
    print(count, float(loss).hex(), flush=True)
    if (count + 1) % digest_every == 0:
        whole, sums = digest(pad, weights)
        print("digest", int(whole), *[float(value).hex() for value in jax.tree.leaves(sums)], flush=True)
    if hegm is not None:
        hegm.boundary()
    pause.wait(pace_s)

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From nothing to a multislice job
#
# The commands from an empty project of Google Cloud to a training on two TPU slices. `--dry-run` prints what each would
# do, so this notebook needs no account and creates nothing. [TPUs in the cloud](../provision.md) has every option.

# %%
import os
import shlex
import subprocess
import sys

os.environ |= {"CLOUDSDK_COMPUTE_ZONE": "us-central2-b", "CLOUDSDK_CORE_PROJECT": "my-project"}


def pax(words):
    """Runs a command and prints its output, one option of gcloud a line."""
    done = subprocess.run([sys.executable, "-m", "paxcli", *shlex.split(words)], capture_output=True, text=True)
    print(done.stdout.replace(" --", " \\\n  --") or done.stderr)


# %% [markdown]
# ## Will it fit, and how fast?
#
# The recipe's mesh has 128 chips in two slices, which `pax recipes show` computes. `pax compile` compiles its step for these
# slices on any Linux machine, which takes minutes; [the table](../compile.md#tpu-recipes) has the results.

# %%
import paxcli

paxcli.load("c4-22b-2xv4-128").sizes()

# %% [markdown]
# ## Create two slices
#
# Several slices are a queued resource, which waits until all of them are available.

# %%
pax("provision demo --accelerator v4-128 --slices 2 --spot --dry-run")

# %% [markdown]
# ## Install pax on every worker
#
# This sends the wheel of your checkout, and installs it with the JAX that it was tested with. Without `--dry-run`:
#
# <!-- cloud -->
# ```console
# $ pax install --on demo
# $ pax doctor --on demo
# ```

# %% [markdown]
# ## Train
#
# The same command as on a laptop, with `--on`. All workers share the run directory, so it is in a bucket. Without `--dry-run`
# its output appears here; Ctrl-C asks whether to detach or to stop. `--restarts` resumes after a preemption.

# %%
pax("train c4-22b-2xv4-128 --overlay synthetic-data --run-dir gs://my-bucket/22b --restarts 20 --on demo --dry-run")

# %% [markdown]
# ## While it runs
#
# `pax provision logs demo`, `attach` and `stop` print, follow and end the job; `pax plot gs://my-bucket/22b` draws its curves
# from anywhere. A shell or a port of a worker:

# %%
pax("provision ssh demo --worker 1.0 --dry-run")
pax("provision forward demo 6006 --dry-run")

# %% [markdown]
# ## Or with a scheduler
#
# The same job as a JobSet of GKE. Slurm and SkyPilot work in the same way.

# %%
pax(
    "provision emit c4-22b-2xv4-128 --target gke --accelerator v4-128 --slices 2 --run-dir gs://my-bucket/22b --image gcr.io/my-project/pax"
)

# %% [markdown]
# ## Delete

# %%
pax("provision delete demo --dry-run")

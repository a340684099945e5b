"""How long training would take, where ranks would wait and what it needs in memory: a model of steps and epochs.

Pure functions of plain values; only `this_cpu` measures. Plans are those of `lightning_odc.balance`::

    from lightning_odc.simulate import Cluster, Model, simulate

    cluster = Cluster.of("H100", devices=16, devices_per_node=8)
    model = Model.from_config(config, cluster.device)
    run = simulate(lengths, model, cluster, minibatch_size=4, policy="lb_mini", communication="on_demand")
    run.seconds, run.idle_fraction, run.causes, run.memory.total

To compare settings, plan once for each policy and simulate each way to communicate with the same work::

    work = plan_work(lengths, model, cluster, minibatch_size=4, policy="lb_micro", minibatches=100)
    slow = simulate_work(work, model, cluster, communication="collective")
    fast = simulate_work(work, model, cluster, communication="on_demand", sharding="hybrid")
    speed_up = slow.mean_seconds / fast.mean_seconds

Plans do not depend on bandwidth. So a break-even is a search over ``simulate_work(work, model, cluster.but(link=x))``.
"""

from lightning_odc.simulate.calibration import this_cpu
from lightning_odc.simulate.cluster import Cluster
from lightning_odc.simulate.devices import DEVICES, Device
from lightning_odc.simulate.memory import Memory, memory_of
from lightning_odc.simulate.model import PRECISIONS, Model, Unit
from lightning_odc.simulate.run import COMMUNICATIONS, SHARDINGS, simulate, simulate_work
from lightning_odc.simulate.simulation import CAUSES, Simulation
from lightning_odc.simulate.unbalanced import Unbalanced
from lightning_odc.simulate.work import Plans, Work, plan_work, work_of

__all__ = [
    "CAUSES",
    "COMMUNICATIONS",
    "DEVICES",
    "PRECISIONS",
    "SHARDINGS",
    "Cluster",
    "Device",
    "Memory",
    "Model",
    "Plans",
    "Simulation",
    "Unbalanced",
    "Unit",
    "Work",
    "memory_of",
    "plan_work",
    "simulate",
    "simulate_work",
    "this_cpu",
    "work_of",
]

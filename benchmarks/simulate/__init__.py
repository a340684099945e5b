"""The simulator: how long training would take, where ranks would wait and what it needs in memory.

Pure functions of plain values. Plans are those of `lightning_odc.balance`. Plan once for each policy, and simulate each
way to communicate with the same work::

    cluster = Cluster.of("H100", devices=16, devices_per_node=8)
    model = Model.from_config(config, cluster.device)
    work = plan_work(lengths, model, cluster, minibatch_size=4, policy="lb_micro", minibatches=100)
    slow = simulate_work(work, model, cluster, communication="collective")
    fast = simulate_work(work, model, cluster, communication="on_demand", sharding="hybrid")
    speed_up = slow.mean_seconds / fast.mean_seconds

Plans do not depend on bandwidth. So a break-even is a search over ``simulate_work(work, model, cluster.but(link=x))``.
``python -m benchmarks.simulate`` compares it with measurements and with published figures.
"""

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.devices import DEVICES, Device
from benchmarks.simulate.memory import Memory, memory_of
from benchmarks.simulate.model import Model, Unit
from benchmarks.simulate.run import simulate_work
from benchmarks.simulate.simulation import Simulation
from benchmarks.simulate.work import Plans, Unbalanced, Work, plan_work, work_of

__all__ = [
    "DEVICES",
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
    "simulate_work",
    "work_of",
]

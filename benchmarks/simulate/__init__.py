"""The simulator: how one minibatch, planned for hundreds of ranks, would spend its time.

Pure functions of plain values. Plans are those of `lightning_odc.balance`. Plan once for each policy, and simulate each
way to communicate with the same work::

    cluster = Cluster(devices=256)
    model = Model.from_config(config, cluster.device)
    work = plan_work(lengths, model, cluster, minibatch_size=4, policy="lb_micro", minibatches=10)
    slow = simulate_work(work, model, cluster, communication="collective")
    fast = simulate_work(work, model, cluster, communication="on_demand", sharding="hybrid")
    speed_up = slow.mean_seconds / fast.mean_seconds

A plan does not depend on bandwidth, so the same work serves other networks. ``python -m benchmarks.simulate`` has 8 to
16,384 devices.
"""

from benchmarks.simulate.cluster import H100, Cluster, Device
from benchmarks.simulate.model import Model, Unit
from benchmarks.simulate.simulation import Simulation, simulate_work
from benchmarks.simulate.work import Work, plan_work

__all__ = ["H100", "Cluster", "Device", "Model", "Simulation", "Unit", "Work", "plan_work", "simulate_work"]

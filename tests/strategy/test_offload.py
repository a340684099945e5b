"""``cpu_offload`` where GPUs compute: shards in host memory need a process group that knows host memory."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_odc import ODCStrategy, _compat_lightning
from lightning_odc.sharding.checkpoints import optimizer_state
from lightning_odc.strategy.setup.precision import ODCPrecision
from lightning_odc.strategy.setup.sharded import OFFLOADING_BACKEND
from tests.support.ranks import on_ranks

GPUS = [torch.device("cuda", index) for index in range(2)]
#: As the default, with gloo in the place of NCCL, which needs a GPU.
LIKE_THE_DEFAULT = OFFLOADING_BACKEND.replace("nccl", "gloo")


def _offloaded(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's shard, in host memory, of a tensor on a mesh of GPUs, as ``CPUOffloadPolicy`` leaves them."""
    alike = DTensor.from_local(local.to("meta"), mesh, [Shard(0)], run_check=False)
    # `from_local` would move it to the mesh.
    return cast(Any, DTensor)(local, alike._spec, requires_grad=False)


@on_ranks(2, alone=True)
@pytest.mark.parametrize("backend", [LIKE_THE_DEFAULT, "cuda:gloo"])
def test_clipping_and_saving_are_collectives_in_host_memory(rank, backend):
    dist.init_process_group(backend)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("shard",))
    parameter = nn.Parameter(_offloaded(torch.zeros(2), mesh))
    parameter.grad = _offloaded(torch.full((2,), rank + 1.0), mesh)
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    precision = ODCPrecision("32-true", "cuda")
    try:
        if backend == "cuda:gloo":  # the reason for all this, and what to look at if torch learns it one day
            with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
                precision.clip_grad_by_norm(optimizer, 1.0)
            return
        precision.clip_grad_by_norm(optimizer, 1.0)
        optimizer.step()
        saved = optimizer_state(nn.Module(), optimizer, full=True)
    finally:
        dist.destroy_process_group()
    assert precision.gradient_norm.item() == pytest.approx(10**0.5)  # of 1, 1, 2, 2
    if rank > 0:
        assert saved == {}
    else:
        momentum = saved["state"][0]["momentum_buffer"]
        assert torch.allclose(momentum, torch.tensor([1.0, 1.0, 2.0, 2.0]) / 10**0.5)


def _started_with(monkeypatch: pytest.MonkeyPatch, **options: Any) -> str | None:
    """The backend with which Lightning is left to start the process group."""
    found = []
    start = "setup_environment"
    register = "lightning_odc._compat_lightning.atexit.register"
    monkeypatch.setattr(FSDPStrategy, start, lambda self: found.append(self.process_group_backend))
    monkeypatch.setattr(register, lambda function: found.append("ended"))
    attaching = "lightning_odc.strategy.setup.attaching"
    monkeypatch.setattr(f"{attaching}.RollCall", lambda: None)  # there is no group to call
    monkeypatch.setattr(f"{attaching}.destroy_groups_at_exit", lambda: None)
    ODCStrategy(**options).setup_environment()
    expected = []
    if "nccl" in (found[-1] or "") and options.get("cpu_offload"):
        expected = ["ended"]
    assert found[:-1] == expected
    return found[-1]


def test_the_process_group_is_chosen_where_shards_are_offloaded(monkeypatch):
    assert _started_with(monkeypatch, parallel_devices=GPUS, cpu_offload=True) == "cpu:gloo,cuda:nccl"
    assert _started_with(monkeypatch, parallel_devices=GPUS) is None  # Lightning's default
    assert _started_with(monkeypatch, parallel_devices=[torch.device("cpu")] * 2, cpu_offload=True) is None
    for own in ("gloo", "cpu:gloo,cuda:gloo"):
        options = {"parallel_devices": GPUS, "cpu_offload": True, "process_group_backend": own}
        assert _started_with(monkeypatch, **options) == own
    options = {"parallel_devices": GPUS, "cpu_offload": False, "process_group_backend": "nccl"}
    assert _started_with(monkeypatch, **options) == "nccl"
    assert callable(_compat_lightning._destroy_dist_connection)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"parallel_devices": GPUS, "cpu_offload": True}, "cpu:gloo,cuda:nccl"),
        ({"parallel_devices": [torch.device("cpu")] * 2}, "gloo"),
    ],
)
def test_nccl_is_refused_where_tensors_are_in_host_memory(options, line):
    strategy = ODCStrategy(process_group_backend="nccl", **options)
    with pytest.raises(ValueError, match=f'write process_group_backend="{line}"'):
        strategy.setup_environment()

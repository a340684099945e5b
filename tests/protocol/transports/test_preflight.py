"""Why GPUs cannot share memory, said before anything is allocated: functions of facts, so no GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

from lightning_odc import ODCStrategy
from lightning_odc.errors import WindowError
from lightning_odc.protocol.transports import check_device, make_transport, preflight
from lightning_odc.protocol.transports.base import UnitSpec, WindowSpec
from lightning_odc.protocol.transports.cuda import CudaTransport
from lightning_odc.protocol.transports.preflight import DeviceFacts
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport

GIB = 2**30
H200 = "NVIDIA H200"
UNIT = UnitSpec("block", GIB // 2, torch.bfloat16, GIB // 2, torch.float32)  # 1 GiB of shards, 2 GiB of sums
SPEC = WindowSpec(units=(UNIT,), words=1)


def facts(**changes: object) -> DeviceFacts:
    device_facts = DeviceFacts(H200, "one", free=4 * GIB, reaches={"two": True})
    return replace(device_facts, **changes)  # type: ignore[arg-type]


def other(**changes: object) -> DeviceFacts:
    return replace(facts(uuid="two", reaches={"one": True}), **changes)  # type: ignore[arg-type]


def refusal(*ranks: DeviceFacts) -> str:
    with pytest.raises(WindowError) as error:
        preflight.check(ranks)
    assert str(error.value).endswith(
        'Or use ODCStrategy(communication="collective"), which needs none of this.'
    )
    return str(error.value)


def test_gpus_that_map_each_other_pass():
    preflight.check([facts(), other()])
    preflight.check([facts(reaches={}), other(reaches={})])  # they see their own only: nobody knows
    preflight.check([facts(), other(name="NVIDIA H100")])  # different, but they can
    preflight.check([facts(name=MIG), facts(name=MIG)])  # torch allows it for tests


MIG = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
#: By ranks, how the message begins, and what it says as well.
REFUSED: list[tuple[DeviceFacts, DeviceFacts, str, str]] = [
    (
        facts(),
        other(reaches={"one": False}),
        f"the GPU of rank 1 ({H200}) cannot access the memory of the GPU of rank 0 ({H200}; no peer-to-peer",
        "`nvidia-smi topo -p2p r`",
    ),
    (facts(name=MIG), other(name=MIG), "rank 0 runs on a MIG slice", "nvidia-smi -mig 0"),
    (
        facts(folder="/tmp"),
        other(folder="/job/7"),
        "",
        "which is /tmp for rank 0 and /job/7 for rank 1: set TMPDIR to the same folder",
    ),
    (facts(), other(backend="ROCm", name="MI300X"), "", "backend of rank 1 (MI300X, ) is ROCm: install"),
    (
        facts(),
        other(backend=None, stack="torch 2.9.0"),
        "",
        "The backend of rank 1 (NVIDIA H200, torch 2.9.0) is None: install torch",
    ),
    (facts(), other(backend="NVSHMEM"), "", "is NVSHMEM: install"),
]


@pytest.mark.parametrize(("one", "two", "begins", "says"), REFUSED)
def test_gpus_that_cannot_map_each_other_are_refused(one, two, begins, says):
    message = refusal(one, two)
    assert message.startswith(begins)
    assert says in message


def test_additions_over_a_link_without_atomics():
    one = facts(atomics={"two": True})
    assert preflight.why_not_atomic([one, other(atomics={"one": True})]) == ""
    assert preflight.why_not_atomic([facts(), facts()]) == ""  # one GPU adds to its own memory
    for there in ({"one": False}, {}):  # over PCIe; or not visible from here
        message = preflight.why_not_atomic([one, other(atomics=there)])
        assert message.startswith("additions from the GPU of rank 1 to the memory of that of rank 0 are not")
        assert "`nvidia-smi topo -p2p a`" in message


def test_what_may_stand_behind_an_error():
    error = RuntimeError("CUDA driver error: invalid device context\nC++ stack ...")
    facts_of_rank = facts(stack="torch 2.11.0, CUDA 13.0")
    message = preflight.explain(error, facts_of_rank, replace(SPEC, sources=2))
    assert "could not be mapped by the peers: CUDA driver error: invalid device context. What" in message
    for hint in (
        "shards and gradient accumulators (2 per shard) take 5.00 GiB",
        "4.00 GiB were free",
        "give every rank a GPU of its own",
        "--gpus-per-node",
        'TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 for every rank and use ODCStrategy(process_group_backend="gloo")',
        "--pid=host",
        "sandbox",
        "nvidia-fabricmanager",
        "(torch 2.11.0, CUDA 13.0)",
        'ODCStrategy(communication="collective")',
    ):
        assert hint in message
    assert "C++ stack" not in message


def test_which_transport(monkeypatch):
    check_device("cpu")
    check_device("cuda")
    with pytest.raises(
        WindowError, match=r'not between mps devices.*ODCFabricStrategy\(communication="collective"\)'
    ):
        check_device("mps", "ODCFabricStrategy")
    gpus = [torch.device("cuda", index) for index in range(2)]
    monkeypatch.setattr(FSDPStrategy, "setup_environment", lambda self: None)  # here are no GPUs
    monkeypatch.setattr(
        "lightning_odc.strategy.setup.attaching.RollCall", lambda: None
    )  # there is no group to call
    ODCStrategy(parallel_devices=gpus).setup_environment()
    made = [
        make_transport(torch.device(name), 0, 2, lambda item: [item] * 2, None) for name in ("cpu", "cuda:0")
    ]
    assert [type(transport) for transport in made] == [SharedMemoryTransport, CudaTransport]

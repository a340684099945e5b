"""Many short minibatches with unequal work: nothing grows, and the end is that of one process."""

from __future__ import annotations

from benchmarks.robustness.endurance import endure


def test_nothing_grows():
    found = endure(100)
    # Steps of 0.01 times gradients that differ by a few of their last bits in fp32 (1e-6 of values below 10), a hundred
    # times: 1e-5. A microbatch that is lost once moves parameters by 1e-3.
    assert found["difference"] < 1e-5
    assert all(reads > 100 for reads in found["read"])
    for grown in found["growth"]:
        assert grown["descriptors"] == grown["threads"] == grown["python_threads"] == 0
        assert (
            grown["private_kib"] < 8 * 1024
        )  # the allocator's own doing; a window has 0.5 MiB, a leak one per step
        assert grown["shared_kib"] < 256

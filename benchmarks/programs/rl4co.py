"""RL4CO: REINFORCE on tours of ten cities, in TensorDicts. It takes the best city, since ranks would draw others."""

from __future__ import annotations

from rl4co.envs import TSPEnv
from rl4co.models import AttentionModel, AttentionModelPolicy

from benchmarks.programs.training import SAMPLES, Project


def project() -> Project:
    """A small policy that normalizes each sample by itself."""
    environment = TSPEnv(generator_params={"num_loc": 10})
    sizes = {"embed_dim": 32, "num_heads": 4, "num_encoder_layers": 2, "feedforward_hidden": 64}
    policy = AttentionModelPolicy(normalization="instance", train_decode_type="greedy", **sizes)
    counts = {"train_data_size": SAMPLES, "val_data_size": 16, "test_data_size": 16, "batch_size": 8}
    data = environment.dataset(SAMPLES)
    return Project(AttentionModel(environment, policy, "no", **counts), data, data.collate_fn)

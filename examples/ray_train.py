"""The strategy in a job of Ray Train, which starts again from its last checkpoint."""

import os

import ray
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_odc.ray import RayODCStrategy
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_checkpoint
from ray.train.lightning import (
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        self.net = nn.Sequential(nn.Embedding(16, 8), *blocks, nn.Linear(8, 16))

    def training_step(self, samples, batch_idx):
        tokens = sum(len(s) - 1 for s in samples)
        loss = sum(
            nn.functional.cross_entropy(self.net(s[:-1]), s[1:], reduction="sum")
            for s in samples
        )
        self.log("loss", loss / tokens, sync_dist=True)
        return {"loss": loss, "num_items": tokens}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(config):  # runs on every worker
    torch.manual_seed(0)
    lengths = torch.randint(4, 40, (48,)).tolist()
    samples = [torch.randint(16, (length,)) for length in lengths]
    trainer = Trainer(
        strategy=RayODCStrategy(balance="lb_mini", max_tokens=64),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        accelerator="cpu",
        devices="auto",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    checkpoint = get_checkpoint()  # after a restart
    path = f"{checkpoint.to_directory()}/checkpoint.ckpt" if checkpoint else None
    loader = DataLoader(samples, batch_size=4, shuffle=True, collate_fn=list)
    prepare_trainer(trainer).fit(Model(), loader, ckpt_path=path)


if __name__ == "__main__":
    ray.init(num_cpus=2)
    scaling = ScalingConfig(num_workers=2, placement_strategy="STRICT_PACK")
    run = RunConfig(
        storage_path=os.path.abspath("results"),
        failure_config=FailureConfig(max_failures=1),
    )
    result = TorchTrainer(train, scaling_config=scaling, run_config=run).fit()
    print(result.metrics)  # of rank 0
    with result.checkpoint.as_directory() as directory:
        state = torch.load(f"{directory}/checkpoint.ckpt", weights_only=False)
    Model().load_state_dict(state["state_dict"])  # whole weights, on one device

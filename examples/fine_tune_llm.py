"""Fine-tune a chat model of the Hugging Face hub with LoRA, and write a directory for `from_pretrained`."""

from functools import partial

import lightning_odc  # noqa: F401  this registers "odc"
import torch
from datasets import load_dataset
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    get_cosine_schedule_with_warmup,
)

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # of the hub, or a folder
DATA = "trl-lib/Capybara"  # rows of "messages": "role" and "content"
MAX_LENGTH = 2048
MAX_STEPS = 20
TRAINED = "fine-tuned"


class FineTune(LightningModule):
    strict_loading = False  # checkpoints have the adapters alone

    def __init__(self):
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(MODEL)
        model.gradient_checkpointing_enable()
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
        self.model = get_peft_model(model, lora).train()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        answers = int((batch["labels"] != -100).sum())  # tokens of the mean
        self.log("eval_loss", loss, batch_size=answers, sync_dist=True)

    def on_validation_epoch_end(self):
        loss = self.trainer.callback_metrics["eval_loss"]
        self.print(f"step {self.global_step}: eval_loss {loss:.3f}")

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-4)
        schedule = get_cosine_schedule_with_warmup(optimizer, 2, MAX_STEPS)
        scheduler = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        adapters = {n: v for n, v in state.items() if "lora_" in n}
        checkpoint["state_dict"] = adapters


def tokenize(row, tokenizer):
    """Tokens of a chat; only those that the assistant says are labels."""
    template = partial(tokenizer.apply_chat_template, tokenize=False)
    tokens = partial(tokenizer, add_special_tokens=False)
    messages = row["messages"]
    known = ""
    ids = []
    labels = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = template(messages[:number], add_generation_prompt=True)
            said = template(messages[: number + 1])
            if not (asked.startswith(known) and said.startswith(asked)):
                raise ValueError("The chat template changes earlier turns.")
            prompt = tokens(asked[len(known) :])["input_ids"]
            answer = tokens(said[len(asked) :])["input_ids"]
            ids += prompt + answer
            labels += [-100] * len(prompt) + answer
            known = said
    mask = [1] * len(ids)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main():
    seed_everything(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def loader(split, **options):
        chats = load_dataset(DATA, split=split)
        chats = chats.map(
            tokenize,
            fn_kwargs={"tokenizer": tokenizer},
            remove_columns=chats.column_names,
        )
        chats = chats.filter(lambda one: 0 < len(one["labels"]) <= MAX_LENGTH)
        collate = DataCollatorForSeq2Seq(tokenizer)  # pads labels with -100
        return DataLoader(chats, batch_size=8, collate_fn=collate, **options)

    model = FineTune()
    checkpoints = ModelCheckpoint("steps", every_n_train_steps=5, save_last=True)
    trainer = Trainer(
        strategy="odc",
        accelerator="cpu",  # or "gpu"
        devices=2,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        max_steps=MAX_STEPS,
        val_check_interval=5,  # batches
        check_val_every_n_epoch=None,
        limit_val_batches=4,
        num_sanity_val_steps=-1,  # evaluates before the first step, too
        log_every_n_steps=1,
        logger=CSVLogger("logs"),  # or WandbLogger, TensorBoardLogger
        callbacks=[checkpoints],
    )
    train = loader("train", shuffle=True)
    trainer.fit(model, train, loader("test"), ckpt_path="last")  # resumes
    if trainer.is_global_zero:
        model.model.merge_and_unload().save_pretrained(TRAINED)
        tokenizer.save_pretrained(TRAINED)
        print(f"Wrote {TRAINED}")


if __name__ == "__main__":
    main()

"""Sentence Transformers: its ``Trainer``, which saves the model itself, over sentences of different lengths."""

from __future__ import annotations

from tempfile import mkdtemp
from typing import Any

import numpy as np
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import CosineSimilarityLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from benchmarks.programs.training import EACH, ODC, RANKS, SAMPLES, START, STEPS, Run
from lightning_odc.huggingface import ODCTrainerMixin

WORDS = 100


class OdcTrainer(ODCTrainerMixin, SentenceTransformerTrainer):  # type: ignore[misc]
    """What a user writes."""


def network() -> Any:
    """A small BERT without dropout. It comes from files, since its library makes models of names only."""
    folder = mkdtemp()
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, "w1"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=WORDS, **sizes, **calm)
    BertModel(config).save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(folder), Pooling(32)], device="cpu")


def train(run: Run) -> None:
    """Pairs of sentences and how similar they are."""
    random = np.random.default_rng(0)

    def sentences() -> list[str]:
        lengths = random.integers(4, 100, SAMPLES)
        return [" ".join(f"w{i}" for i in random.integers(WORDS, size=length)) for length in lengths]

    data = Dataset.from_dict({"first": sentences(), "second": sentences(), "score": random.random(SAMPLES)})
    model = network()
    run.keep(model.state_dict(), START)
    folder = str(run.path("saved"))
    arguments = SentenceTransformerTrainingArguments(
        folder,
        per_device_train_batch_size=RANKS * EACH // run.devices,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=STEPS // 2,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    kind = {ODC: OdcTrainer}.get(run.strategy, SentenceTransformerTrainer)
    kind(model=model, args=arguments, train_dataset=data, loss=CosineSimilarityLoss(model)).train()
    run.keep(model.state_dict())
    again = SentenceTransformer(f"{folder}/checkpoint-{STEPS}", device="cpu")
    model.save_pretrained(f"{folder}/last")
    run.keep_predicted(again.encode(data["first"]))

"""Trainers of ``transformers`` and TRL with the mix-in on two ranks, against the same trainers without it.

If a rule explains the loss, the reference is the trainer in one process, with all samples of a step in one batch. If
none does, it is the trainer on two ranks. To print the distances of all of them::

    python -m tests.test_huggingface_trainers
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import run_ranks

pytest.importorskip("accelerate")

import transformers
from transformers import PrinterCallback, Trainer, TrainingArguments

from lightning_odc import Minibatch
from lightning_odc.huggingface import ODCTrainerMixin
from tests.strategy.test_models import VOCAB, causal_lm
from tests.support.models import full_parameters
from tests.support.tiers import fast

LENGTHS = [20, 8, 9, 7, 8, 9, 8, 7, 8, 7, 19, 9, 8, 6, 7, 9]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB}
LR = 0.1
#: The largest distance of what a rank has trained from the reference, relative to what training moves. A step adds up
#: eight gradients in fp32, in another order.
BOUND = 2e-5
#: The same for parameters in bf16, which keep 8 bits: what training moves is less than a parameter by as much.
BOUND_OF_16_BITS = 0.2


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def samples(**others: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Samples of unlike length; ``others`` make further columns of the number of a sample."""
    return [
        {"input_ids": tokens(length, index), **{name: make(index) for name, make in others.items()}}
        for index, length in enumerate(LENGTHS)
    ]


def padded(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Tokens are padded; labels are what a sample has, or its tokens, of which some are masked."""
    made: dict[str, Tensor] = {}
    for name in batch[0]:
        values = [torch.tensor(sample[name]) for sample in batch]
        padding = 0
        if name == "labels":
            padding = -100
        dim = values[0].dim()
        if dim == 1 and name != "classes":
            made[name] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding)
        else:
            made[name] = torch.stack(values)
    made["attention_mask"] = (made["input_ids"] > 0).long()
    if "classes" in made:
        made["labels"] = made.pop("classes")
    if "labels" not in made:
        ids = made["input_ids"]
        made["labels"] = ids.masked_fill((ids == 0) | (ids % 5 == 0), -100)
    return made


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


class SequenceMeans(Trainer):
    """Every sequence counts alike."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")[:, 1:]
        outputs = model(**inputs)
        losses = cross_entropies(outputs.logits[:, :-1], labels)
        total = (labels != -100).sum(1)
        loss = (losses.sum(1) / total).mean()
        if return_outputs:
            return (loss, outputs)
        return loss


class TokenMean(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")[:, 1:]
        return nn.functional.cross_entropy(model(**inputs).logits[:, :-1].transpose(1, 2), labels)


class ClassWeights(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        labels = inputs.pop("labels")
        weight = torch.tensor([1.0, 3.0, 0.5])
        return nn.functional.cross_entropy(model(**inputs).logits, labels, weight=weight.to(labels.device))


class Pairs(Trainer):
    """Every sample of a batch is compared with all others."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        del inputs["labels"]
        logits = model(**inputs).logits
        return nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)).flip(0))


def sum_by_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropies(outputs.logits[:, :-1], labels[:, 1:]).sum() / num_items_in_batch


class Couples(nn.Module):
    """Batch norm over the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = attention_mask[..., None]
        means = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return {"loss": nn.functional.cross_entropy(self.head(self.norm(means)), labels)}


class OwnModel(nn.Module):
    """A model of one's own, without anything that transformers' models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Any = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)}


def bert(kind: str, **config: Any) -> Any:
    config = {"intermediate_size": 24, "hidden_dropout_prob": 0.0, **config}
    bert_config = transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0, **config)
    return getattr(transformers, f"BertFor{kind}")(bert_config)


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


class Clip(transformers.CLIPModel):
    """Asks for its loss by itself."""

    def forward(self, labels: Any = None, **inputs: Any) -> Any:
        return super().forward(**inputs, return_loss=True)


def clip() -> Any:
    own = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**own, "vocab_size": VOCAB, "eos_token_id": 2}
    vision = {**own, "image_size": 8, "patch_size": 4}
    return Clip(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def experts() -> Any:
    """A mixture of experts with a loss that balances its router, which couples samples."""
    heads = {"num_key_value_heads": 1, "intermediate_size": 24, "num_local_experts": 4}
    config = transformers.MixtralConfig(**SIZES, **heads, output_router_logits=True, router_aux_loss_coef=1.0)
    return transformers.MixtralForCausalLM(config)


def adapters() -> Any:
    import peft

    return peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )


def lora() -> Any:
    import peft

    return peft.get_peft_model(causal_lm(), adapters())


def qlora() -> Any:
    """The same adapters over weights of 4 bits, loaded as users load them."""
    import peft

    with tempfile.TemporaryDirectory() as folder:
        causal_lm().save_pretrained(folder)
        quantization_config = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=quantization_config
        )
    torch.manual_seed(0)
    return peft.get_peft_model(model, adapters())


def reward() -> Any:
    heads = {"num_key_value_heads": 1, "intermediate_size": 24, "num_labels": 1, "pad_token_id": 0}
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, **heads))


def images(index: int) -> Any:
    return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)).tolist()


@dataclass
class Case:
    """A trainer, its model and its data."""

    model: Callable[[], Any]
    trainer: type | str = Trainer  # or the name of one of TRL's
    columns: dict[str, Callable[[int], Any]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    named: dict[str, Any] = field(default_factory=dict)
    whole: bool = False  # no rule explains the loss
    reference_model: bool = False
    teacher: Callable[[], Any] | None = None
    module: str = "trl"  # which has the trainer
    below: bool = False  # the class that has the mix-in has the loss
    rounded: bool = False  # TRL keeps the adapters of a quantised model in bf16


def a_class(index: int) -> int:
    return index % 3


CASES = {
    "Llama, causal": Case(causal_lm),
    "Llama, tied weights": Case(lambda: causal_lm(tied=True)),
    "Llama, compute_loss_func": Case(causal_lm, named={"compute_loss_func": sum_by_items}),
    "Llama, compute_loss with a token mean": Case(causal_lm, TokenMean),
    "Llama, compute_loss with a mean of sequence means": Case(causal_lm, SequenceMeans),
    "Llama, compute_loss of the class itself": Case(causal_lm, SequenceMeans, below=True),
    "Llama, label_smoothing_factor=0.1": Case(causal_lm, options={"label_smoothing_factor": 0.1}),
    "Llama, activation checkpointing": Case(causal_lm, options={"activation_checkpointing": True}),
    "Llama, LoRA": Case(lora),
    "Mixtral, a loss of the router": Case(experts, whole=True),
    "a model of one's own": Case(OwnModel),
    "a model with batch norm": Case(Couples, columns={"labels": a_class}, whole=True),
    "BERT, classes": Case(lambda: bert("SequenceClassification", num_labels=3), columns={"labels": a_class}),
    "BERT, classes, label smoothing": Case(
        lambda: bert("SequenceClassification", num_labels=3),
        columns={"labels": a_class},
        options={"label_smoothing_factor": 0.1},
    ),
    "BERT, several labels": Case(
        lambda: bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        columns={"classes": lambda index: [float(index % 2), 1.0, float(index % 3 == 0)]},
    ),
    "BERT, regression": Case(
        lambda: bert("SequenceClassification", num_labels=1), columns={"labels": lambda index: index / 16}
    ),
    "BERT, tokens": Case(
        lambda: bert("TokenClassification", num_labels=VOCAB),
    ),
    "BERT, masked language": Case(lambda: bert("MaskedLM")),
    "BERT, compute_loss with class weights": Case(
        lambda: bert("SequenceClassification", num_labels=3),
        ClassWeights,
        columns={"labels": a_class},
        whole=True,
    ),
    "BERT, compute_loss with pairs of the batch": Case(
        lambda: bert("SequenceClassification", num_labels=3), Pairs, columns={"labels": a_class}, whole=True
    ),
    "T5": Case(t5, columns={"labels": lambda index: tokens(3 + index % 5, 100 + index)}),
    "CLIP": Case(clip, columns={"pixel_values": images, "labels": a_class}, whole=True),
}


#: One of each kind: a rule explains the loss of a sharded encoder, one of the class's own, and none.
FAST = ("BERT, regression", "a model with batch norm")


def arguments(kind: Any, folder: str, **options: Any) -> Any:
    known = {
        "use_cpu": True,
        "num_train_epochs": 1,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "report_to": [],
        "dataloader_pin_memory": False,
    }
    return kind(folder, **{**known, **options})


@dataclass
class Trained:
    """What came out of a training."""

    losses: list[float]  # and rewards of those that generate
    parameters: dict[str, Tensor]
    moved: dict[str, Tensor]
    warnings: list[str]
    counts: list[int]  # microbatches of each batch of `Trainer`

    def distance(self, other: Trained) -> float:
        """Of the parameters, relative to what the other one has moved."""
        apart = sum(
            (self.parameters[name] - value).square().sum() for name, value in other.parameters.items()
        )
        return float((apart / sum(value.square().sum() for value in other.moved.values())).sqrt())

    def loss_distance(self, other: Trained) -> float:
        assert len(self.losses) == len(other.losses)
        pairs = zip(self.losses, other.losses, strict=True)
        return max(abs(mine - theirs) / (abs(theirs) or 1.0) for mine, theirs in pairs)


def trained(trainer: Any, start: dict[str, Tensor], counts: list[int]) -> Trained:
    trainer.remove_callback(PrinterCallback)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(one.message) for one in caught if "left as they are" in str(one.message)]
    parameters = full_parameters(trainer.model)
    losses = [row[name] for row in trainer.state.log_history for name in ("loss", "reward") if name in row]
    moved = {name: parameters[name] - value for name, value in start.items()}
    return Trained(losses, parameters, moved, said, counts)


def sentence(length: int, seed: int) -> str:
    return " ".join(f"w{token}" for token in tokens(length, seed))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    word_level = models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w1")
    words = Tokenizer(word_level)
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")


def prompt(index: int) -> str:
    return sentence(2 + index % 3, 300 + index)


def completion(index: int) -> str:
    return sentence(LENGTHS[index], index)


PAIRS = {
    "prompt": prompt,
    "chosen": completion,
    "rejected": lambda index: sentence(4 + index % 4, 200 + index),
}


def messages(index: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt(index)}, {"role": "assistant", "content": completion(index)}]


GENERATING = {"num_generations": 2, "max_completion_length": 12, "max_steps": 2}
REWARDED = {"reward_funcs": lambda completions, **_: [float(len(one)) for one in completions]}
LABELLED = {"prompt": prompt, "completion": completion, "label": lambda index: index % 3 > 0}
TRL = {
    "TRL SFT": Case(causal_lm, "SFT", {"text": completion}),
    "TRL SFT, prompt and completion": Case(causal_lm, "SFT", {"prompt": prompt, "completion": completion}),
    "TRL SFT, packing": Case(
        causal_lm,
        "SFT",
        {"text": completion},
        {"packing": True, "max_length": 24, "packing_strategy": "wrapped"},
    ),
    "TRL SFT, LoRA": Case(lora, "SFT", {"text": completion}),
    "TRL Reward": Case(reward, "Reward", PAIRS),
    "TRL DPO": Case(causal_lm, "DPO", PAIRS, reference_model=True),
    "TRL DPO, LoRA": Case(lora, "DPO", PAIRS),
    "TRL KTO": Case(causal_lm, "KTO", LABELLED, whole=True, reference_model=True),
    "TRL GRPO": Case(causal_lm, "GRPO", {"prompt": prompt}, GENERATING, REWARDED, whole=True),
    "TRL GRPO, LoRA, a reference, two passes": Case(
        lora,
        "GRPO",
        {"prompt": prompt},
        {**GENERATING, "beta": 0.1, "num_iterations": 2},
        REWARDED,
        whole=True,
    ),
    "TRL RLOO": Case(
        causal_lm, "RLOO", {"prompt": prompt}, {**GENERATING, "beta": 0.0}, REWARDED, whole=True
    ),
}
TRL |= {
    "TRL Online DPO": Case(
        causal_lm,
        "OnlineDPO",
        columns={"prompt": prompt},
        options={"max_new_tokens": 8, "max_steps": 2},
        named=REWARDED,
        module="trl.experimental.online_dpo",
        whole=True,
    ),
    "TRL GKD": Case(
        causal_lm,
        "GKD",
        columns={"messages": messages},
        options={"lmbda": 0.5, "max_new_tokens": 8, "max_steps": 2},
        module="trl.experimental.gkd",
        teacher=causal_lm,
        whole=True,
    ),
    "TRL ORPO": Case(causal_lm, "ORPO", columns=PAIRS, module="trl.experimental.orpo", whole=True),
    "TRL CPO": Case(causal_lm, "CPO", columns=PAIRS, module="trl.experimental.cpo", whole=True),
}
QUANTISED = {
    "Llama, QLoRA": Case(qlora),
    "TRL DPO, QLoRA": Case(qlora, "DPO", PAIRS, rounded=True),
    "TRL SFT, QLoRA": Case(qlora, "SFT", {"text": completion}, rounded=True),
}
if find_spec("trl") is not None:
    CASES |= TRL
    FAST += ("TRL SFT",)
    if find_spec("bitsandbytes") is not None:
        CASES |= QUANTISED


def from_trl(case: Case, folder: str, options: dict[str, Any], named: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The trainer of TRL, its arguments and its data; ``named`` gets what its constructor takes besides."""
    from datasets import Dataset

    module = import_module(case.module)
    columns = {
        column: [make(index) for index in range(len(LENGTHS))] for column, make in case.columns.items()
    }
    named["processing_class"] = tokenizer()
    torch.manual_seed(1)
    if case.reference_model:
        named["ref_model"] = case.model()
    if case.teacher is not None:
        named["teacher_model"] = case.teacher()
        template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        named["processing_class"].chat_template = template
    config = getattr(module, f"{case.trainer}Config")
    args = arguments(config, folder, bf16=False, gradient_checkpointing=False, **options)
    return getattr(module, f"{case.trainer}Trainer"), args, Dataset.from_dict(columns)


#: With the mix-in.
MIXED_IN = ("whole", "sharded")


def train(rank: int, name: str, how: str, folder: str) -> Trained:
    """Train one case: ``"alone"`` in one process, or on two ranks ``"stock"``, ``"whole"`` or ``"sharded"``."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    start = {key: value.detach().clone() for key, value in full_parameters(model).items()}
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    if how == "alone":
        batches = {"per_device_train_batch_size": 8}
    options = {**case.options, **batches}
    if how == "sharded":
        options["fsdp"] = True
    named: dict[str, Any] = {**case.named}
    data: Any
    if isinstance(case.trainer, str):
        kind, args, data = from_trl(case, folder, options, named)
    else:
        kind = case.trainer
        data = samples(**case.columns)
        args = arguments(TrainingArguments, folder, remove_unused_columns=False, **options)
        named["data_collator"] = padded
    counts: list[int] = []
    beside = kind
    if case.below:
        beside = Trainer

    class Balanced(ODCTrainerMixin, beside):  # type: ignore[misc,valid-type]
        if case.below:
            compute_loss = kind.compute_loss

        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            count = 1
            if isinstance(inputs, Minibatch):
                count = len(inputs)
            counts.append(count)
            return super().training_step(model, inputs, *args)

    trainer_class = kind
    if how in MIXED_IN:
        trainer_class = Balanced
    return trained(trainer_class(model=model, args=args, train_dataset=data, **named), start, counts)


def compare(
    run: Callable[..., list[Trained]], name: str, ours: str, folder: str
) -> tuple[list[Trained], Trained]:
    """What both ranks have trained, and the reference; ``run`` calls a function on ranks."""
    how = "alone"
    if CASES[name].whole:
        how = "stock"
    [reference, *_] = run(train, name, how, folder, world_size=1 + CASES[name].whole)
    return run(train, name, ours, folder), reference


@pytest.mark.parametrize("ours", [pytest.param("whole", marks=pytest.mark.slow), "sharded"])
@pytest.mark.parametrize("name", fast(CASES, *FAST))
def test_a_trainer_ends_in_the_parameters_and_losses_that_it_has_without_the_mix_in(
    teams, name, ours, tmp_path
):
    run = teams.run
    if "QLoRA" in name:  # which saves its model, and with a process group only rank 0 does
        run = run_ranks
    found, reference = compare(run, name, ours, str(tmp_path))
    bound = BOUND
    if CASES[name].rounded:
        bound = BOUND_OF_16_BITS
    for one in found:
        assert one.distance(reference) < bound
        assert one.loss_distance(reference) < BOUND
    say_whole = ["are left as they are" in text for text in found[0].warnings]
    if CASES[name].whole:
        assert say_whole == [True]
        assert [one.counts for one in found] == [[1] * 4] * 2
    else:
        assert True not in say_whole
        assert {0, 2} <= {*found[0].counts, *found[1].counts}  # all microbatches come with the last batch


def train_and_resume(
    rank: int, folder: str
) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train GRPO for four steps, and again from the checkpoint in the middle: losses and parameters of both."""
    case = CASES["TRL GRPO"]
    options = {**case.options, "per_device_train_batch_size": 2, "fsdp": True, "max_steps": 4}
    options |= {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    losses = []
    parameters = []
    steps: list[int] = []
    for checkpoint in (None, f"{folder}/checkpoint-2"):
        torch.manual_seed(0)
        named: dict[str, Any] = {**case.named}
        kind, args, data = from_trl(case, folder, options, named)

        class Balanced(ODCTrainerMixin, kind):  # type: ignore[misc,valid-type]
            def training_step(self, *inputs: Any) -> Any:
                steps.append(self.state.global_step)
                return super().training_step(*inputs)

        torch.manual_seed(0)
        trainer = Balanced(model=case.model(), args=args, train_dataset=data, **named)
        trainer.train(resume_from_checkpoint=checkpoint)
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        parameters.append(full_parameters(trainer.model))
    assert steps == [0, 1, 2, 3, 2, 3]
    return losses[0], losses[1], parameters[0], parameters[1]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL")
def test_grpo_resumes_where_it_was(teams, tmp_path):
    for straight, resumed, once, again in teams.run(train_and_resume, str(tmp_path)):
        assert len(straight) == 4
        assert resumed == straight
        assert once.keys() == again.keys()
        for name, parameter in once.items():
            assert torch.equal(parameter, again[name])


def main() -> None:
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            found, reference = compare(run_ranks, name, "sharded", folder)
        distance = max(one.distance(reference) for one in found)
        how = "one process"
        if CASES[name].whole:
            how = "whole batches"
        print(f"| {name} | {how} | {distance:.0e} | {found[0].loss_distance(reference):.0e} |", flush=True)


if __name__ == "__main__":
    # Data sets of Hugging Face's cannot pickle what is in this module under another name.
    import_module("tests.test_huggingface_trainers").main()

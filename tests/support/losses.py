"""Losses of many kinds of projects, on one set of samples, and the gradient that each of them means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

VOCAB = 19
CLASSES = 4
WIDTH = 6
LENGTHS = (9, 4, 12, 7, 3, 10, 6, 5, 14, 4, 3, 8, 11, 5, 6, 13)
Sample = dict[str, Any]


def samples(lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    """Texts with prompts, classes, numbers, tasks of which some are unknown, series, and rejected answers."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for index, length in enumerate(lengths):
        ids = torch.randint(1, VOCAB, (length,), generator=draw)
        prompt = index % 3
        if length == max(lengths):
            some = -100
        else:
            some = (index * 3) % CLASSES
        labels = torch.cat([torch.full((prompt,), -100), ids[prompt:]])
        target = torch.rand(CLASSES, generator=draw, dtype=torch.float64)
        series = torch.randn(length, WIDTH, generator=draw, dtype=torch.float64)
        rejected = torch.randint(1, VOCAB, (max(length - 2, 2),), generator=draw)
        rare = int(length == max(lengths))
        known = ((torch.arange(CLASSES) + index) % 3 > 0) & (index != 4)
        label = (index * 3) % CLASSES
        made.append(
            {
                "input_ids": ids,
                "labels": labels,
                "label": label,
                "rare": rare,
                "some": some,
                "target": target,
                "known": known,
                "tasks": target.where(known, torch.nan),
                "series": series,
                "rejected": rejected,
            }
        )
    return made


def collate(batch: list[Sample]) -> dict[str, Tensor]:
    def table(name: str, value: int) -> Tensor:
        return pad_sequence([sample[name] for sample in batch], batch_first=True, padding_value=value)

    made = {"input_ids": table("input_ids", 0), "labels": table("labels", -100), "series": table("series", 0)}
    made["attention_mask"] = (made["input_ids"] != 0).long()
    for name in ("label", "rare", "some"):
        made[name] = torch.tensor([sample[name] for sample in batch])
    for name in ("target", "known", "tasks"):
        made[name] = torch.stack([sample[name] for sample in batch])
    made["rejected"] = table("rejected", 0)
    return made


class Losses(LightningModule):
    """One small model for all of them.

    Args:
        kind: A name in `KINDS`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.classes = nn.Linear(WIDTH, CLASSES)
        self.teacher = nn.Linear(WIDTH, VOCAB).requires_grad_(False)
        if kind.startswith("batch norm"):
            self.norm = nn.BatchNorm1d(WIDTH)
        else:
            self.norm = nn.Identity()
        self.seen: Any = None
        self.zeros = nn.Parameter(torch.zeros(VOCAB, WIDTH))
        if kind.endswith("reference model"):
            self.reference = Losses("labels").requires_grad_(False)
            self.reference.load_state_dict(
                {k: v for k, v in self.state_dict().items() if "reference" not in k}
            )
        self.steps_run = 0
        if kind.startswith("hugging face"):
            import transformers

            size = {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
            none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            bert = transformers.BertConfig(vocab_size=VOCAB, **size, **none)
            llama = transformers.LlamaConfig(vocab_size=VOCAB, **size, num_key_value_heads=1, use_cache=False)
            self.model: Any
            if "causal" in kind:
                self.model = transformers.LlamaForCausalLM(llama)
            else:
                if "regression" in kind:
                    bert.num_labels = 1
                else:
                    bert.num_labels = CLASSES
                if "several" in kind:
                    bert.problem_type = "multi_label_classification"
                self.model = transformers.BertForSequenceClassification(bert)

    def states(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.embed(ids)))

    def pooled(self, batch: Any, name: str = "input_ids") -> Tensor:
        mask = (batch[name] != 0).unsqueeze(-1).to(self.mix.weight.dtype)
        return (self.states(batch[name]) * mask).sum(1) / mask.sum(1)

    def log_probabilities(self, ids: Tensor) -> Tensor:
        """Of each text, as a sum over its tokens."""
        each = -F.cross_entropy(self.head(self.states(ids)).transpose(1, 2), ids, reduction="none")
        return (each * (ids != 0)).sum(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps_run += 1
        loss = KINDS[self.kind](self, batch)
        value = loss
        if isinstance(loss, dict):
            value = loss["loss"]
        self.log("loss", value)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0)


def _logits(m: Losses, b: Any) -> Tensor:
    """``[B, words, L]``, as `F.cross_entropy` takes them."""
    return m.head(m.states(b["input_ids"])).transpose(1, 2)


def _tokens(m: Losses, b: Any) -> Tensor:
    return F.cross_entropy(m.head(m.states(b["input_ids"])).flatten(0, 1), b["labels"].flatten())


def _mean(each: Tensor, mask: Tensor) -> Tensor:
    """The mean over samples of the means over each sample's tokens."""
    return ((each * mask).sum(1) / mask.sum(1)).mean()


def _own_mask(m: Losses, b: Any) -> Tensor:
    each = F.cross_entropy(_logits(m, b)[..., :-1], b["input_ids"][:, 1:], reduction="none")
    mask = b["attention_mask"][:, 1:]
    return (each * mask).sum() / mask.sum()


def _sequence_means(m: Losses, b: Any) -> Tensor:
    return _mean(F.cross_entropy(_logits(m, b), b["labels"], reduction="none"), b["labels"] != -100)


def _zero_head(m: Losses, b: Any) -> Tensor:
    scores = torch.einsum("btd,cd->btc", m.states(b["input_ids"]), m.zeros)
    each = F.cross_entropy(scores.transpose(1, 2), b["labels"], reduction="none")
    return _mean(each, b["labels"] != -100)


def _margins(m: Losses, b: Any) -> Tensor:
    return m.log_probabilities(b["input_ids"]) - m.log_probabilities(b["rejected"])


def _referenced(m: Losses, b: Any) -> Tensor:
    """Of a policy that begins as its reference: all losses are log 2."""
    with torch.no_grad():
        reference = _margins(m.reference, b)
    return -F.logsigmoid(0.1 * (_margins(m, b) - reference)).mean()


def _rewards(m: Losses, b: Any) -> Tensor:
    chosen, rejected = (m.classes(m.pooled(b, name))[:, 0] for name in ("input_ids", "rejected"))
    return -F.logsigmoid(chosen - rejected).mean()


def _distilled(m: Losses, b: Any) -> Tensor:
    states = m.states(b["input_ids"])
    mask = b["attention_mask"].bool()
    with torch.no_grad():
        wanted = m.teacher(states).softmax(-1)[mask]
    return F.kl_div(m.head(states).log_softmax(-1)[mask], wanted, reduction="batchmean")


def _ctc(m: Losses, b: Any) -> Tensor:
    scores = m.head(m.states(b["input_ids"])).log_softmax(-1).transpose(0, 1)
    lengths = b["attention_mask"].sum(1)
    return F.ctc_loss(scores, b["label"][:, None] + 1, lengths, torch.ones_like(lengths))


def _items(m: Losses, b: Any) -> dict[str, Any]:
    loss = F.cross_entropy(_logits(m, b), b["labels"], reduction="sum")
    return {"loss": loss, "num_items": (b["labels"] != -100).sum()}


def _classes(m: Losses, b: Any, label: str = "label", **options: Any) -> Tensor:
    return F.cross_entropy(m.classes(m.norm(m.pooled(b))), b[label], **options)


def _regression(m: Losses, b: Any) -> Tensor:
    return F.mse_loss(m.classes(m.pooled(b)), b["target"])


def _tasks(m: Losses, b: Any, known: Tensor) -> Tensor:
    """The mean over all that is known of the tasks of all samples; of one sample, nothing is."""
    return (m.classes(m.pooled(b)) - b["target"])[known].square().mean()


def _several_tasks(m: Losses, b: Any) -> dict[str, Any]:
    by_class = _classes(m, b)
    return {"loss": by_class + 0.3 * _regression(m, b), "by_class": by_class.detach()}


def _series(m: Losses, b: Any) -> Tensor:
    mask = b["attention_mask"].unsqueeze(-1)
    return F.mse_loss(m.classes((torch.tanh(m.mix(b["series"])) * mask).sum(1) / mask.sum(1)), b["target"])


def _noise_predicted(m: Losses, b: Any) -> Tensor:
    noise = torch.randn_like(b["series"])
    errors = (m.mix(b["series"] * 0.7 + noise) - noise).square().sum(2)
    return _mean(errors, b["attention_mask"])


def _dropout(m: Losses, b: Any) -> Tensor:
    logits = m.head(F.dropout(m.states(b["input_ids"]), 0.3))
    return F.cross_entropy(logits.transpose(1, 2), b["labels"])


def _contrastive(m: Losses, b: Any) -> Tensor:
    one, other = (F.normalize(m.pooled(b, name), dim=1) for name in ("input_ids", "rejected"))
    return F.cross_entropy(one @ other.T * 10, torch.arange(len(one)))


def _ranked(m: Losses, b: Any) -> Tensor:
    score = m.classes(m.pooled(b))[:, 0]
    label = b["label"]
    sign = (label[:, None] - label[None]).sign()
    return -F.logsigmoid((score[:, None] - score[None]) * sign).mean()


def _queue(m: Losses, b: Any) -> Tensor:
    mean = m.pooled(b).mean(0)
    loss = _classes(m, b)
    if m.seen is not None:
        loss = loss + (mean - m.seen).square().sum()
    m.seen = mean.detach()
    return loss


def _auxiliary(m: Losses, b: Any) -> Tensor:
    return _tokens(m, b) + 0.1 * m.classes(m.pooled(b)).softmax(-1).mean(0).square().sum()


def _rare_weights(m: Losses, b: Any) -> Tensor:
    weight = torch.tensor([1.0, 20.0]).to(m.mix.weight)
    return F.cross_entropy(m.classes(m.pooled(b))[:, :2], b["rare"], weight=weight)


def _padded_mean(m: Losses, b: Any) -> Tensor:
    return F.mse_loss(m.classes(m.states(b["input_ids"]).mean(1)), b["target"])


def _reduced(m: Losses, b: Any) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(torch.ones(1))
    return _classes(m, b)


def _hugging_face(m: Losses, b: Any, labels: Tensor) -> Tensor:
    return m.model(b["input_ids"], b["attention_mask"], labels=labels).loss


def _hugging_face_logits(m: Losses, b: Any) -> Tensor:
    return F.cross_entropy(m.model(b["input_ids"], b["attention_mask"]).logits.transpose(1, 2), b["labels"])


#: By name: what counts (``labels``, ``mask``, ``entries`` of a tensor, ``samples``, ``sum`` or ``num_items``; with
#: ``whole``, batches stay whole), and the loss.
_KINDS: dict[str, tuple[str, Callable[[Losses, Any], Any]]] = {
    "labels": ("labels", _tokens),
    "labels, shifted by the step": (
        "labels",
        lambda m, b: F.cross_entropy(_logits(m, b)[..., :-1], b["labels"][:, 1:]),
    ),
    "padding as ignore_index": (
        "mask",
        lambda m, b: F.cross_entropy(_logits(m, b), b["input_ids"], ignore_index=0),
    ),
    "own mask": ("mask", _own_mask),
    "loss and num_items": ("num_items", _items),
    "distillation over tokens": ("mask", _distilled),
    "hugging face causal model": ("labels", lambda m, b: _hugging_face(m, b, b["labels"])),
    "hugging face causal model, labels of the collator": ("labels", _hugging_face_logits),
    "classes": ("samples", _classes),
    "several classes": (
        "samples",
        lambda m, b: F.binary_cross_entropy_with_logits(m.classes(m.pooled(b)), b["target"]),
    ),
    "regression": ("samples", _regression),
    "finite entries": ("entries", lambda m, b: _tasks(m, b, b["tasks"].isfinite())),
    "mask of tasks": ("entries", lambda m, b: _tasks(m, b, b["known"])),
    "series": ("samples", _series),
    "means of sequences": ("samples", _sequence_means),
    "preference pairs": ("samples", lambda m, b: -F.logsigmoid(0.1 * _margins(m, b)).mean()),
    "reward pairs": ("samples", _rewards),
    "several tasks": ("samples", _several_tasks),
    "ctc": ("samples", _ctc),
    "hugging face classes": ("samples", lambda m, b: _hugging_face(m, b, b["label"])),
    "hugging face regression": ("samples", lambda m, b: _hugging_face(m, b, b["target"][:, 0])),
    "hugging face several classes": ("samples", lambda m, b: _hugging_face(m, b, b["target"])),
    "sum": ("sum", lambda m, b: _classes(m, b, reduction="sum")),
    "noise": ("samples", _noise_predicted),
    "dropout": ("labels", _dropout),
    "class weights": ("whole", lambda m, b: _classes(m, b, weight=torch.arange(1.0, 5.0).to(m.mix.weight))),
    "contrastive": ("whole", _contrastive),
    "ranked pairs": ("whole", _ranked),
    "batch norm": ("whole", _classes),
    "queue": ("whole", _queue),
    "auxiliary loss": ("whole", _auxiliary),
    "padding in the mean": ("whole", _padded_mean),
    "all_gather": ("whole", lambda m, b: _classes(m, b) + 0 * m.all_gather(torch.ones(1)).sum()),
    "preference pairs, reference model": ("samples", _referenced),
    "zero head by einsum": ("samples", _zero_head),
    "classes, one ignored": ("entries", lambda m, b: _classes(m, b, "some")),
    "rare class weights": ("whole", _rare_weights),
    "all_reduce": ("whole", _reduced),
}
COUNTS = {name: counts for name, (counts, _) in _KINDS.items()}
KINDS = {name: loss for name, (_, loss) in _KINDS.items()}
#: Whose loss has no value that repeats.
RANDOM = ("noise", "dropout")
#: What depends on the batches that this rank ran before.
STATEFUL = ("queue",)


def dealt(data: Sequence[Any], world_size: int, batch_size: int) -> list[list[Any]]:
    """The batches of an optimizer step as a distributed sampler deals them to ranks, all in one list."""
    own = [data[rank::world_size] for rank in range(world_size)]
    return [list(part[i : i + batch_size]) for part in own for i in range(0, len(part), batch_size)]


def meant(kind: str, batches: list[list[Sample]], world_size: int) -> dict[str, Tensor]:
    """Parameters after one step of one process on what a loss means: a mean over all that counts, or over batches."""
    module = Losses(kind).double()
    for part in module.modules():
        part.training = not isinstance(part, nn.Dropout)
    object.__setattr__(module, "log", lambda *_: None)
    object.__setattr__(module, "all_gather", lambda tensor: tensor)
    optimizer = module.configure_optimizers()
    if COUNTS[kind] == "whole":
        for batch in batches:
            (KINDS[kind](module, collate(batch)) / len(batches)).backward()
    else:
        whole = KINDS[kind](module, collate([sample for batch in batches for sample in batch]))
        if COUNTS[kind] == "num_items":
            whole = whole["loss"] / whole["num_items"]
        elif COUNTS[kind] == "sum":
            whole = whole / len(batches)
        (whole["loss"] if isinstance(whole, dict) else whole).backward()
    optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}

"""A decoder-only language model, byte by byte, on the language reference that comes with Python.

It learns to say which byte comes next, from `context` bytes before it. A layer of the model is a layer of a pipeline.

mpirun -n 2 hpcdist train jobs/transformer.py
"""

import math
import platform
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcdist.data.writer import Split, create
from hpcdist.train import Job, Metric

CONTEXT = 64  # bytes of a sample
BYTES = 256  # the vocabulary
TEST_PART = 10  # the last tenth of the text


# --- the model --------------------------------------------------------------------------------------------------------
def _normal(layer: nn.Linear | nn.Embedding, std: float = 0.02) -> nn.Linear | nn.Embedding:
    """Give a layer the initial values of GPT-2, and return it."""
    nn.init.normal_(layer.weight, std=std)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class Embedding(nn.Module):
    """A vector for each byte, and one for each position, added up."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.byte = _normal(nn.Embedding(BYTES, width))
        self.position = _normal(nn.Embedding(CONTEXT, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.dropout(self.byte(x.long()) + self.position(positions))


class Block(nn.Module):
    """Causal attention and a perceptron, each after a normalisation and around a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float, residual_std: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = _normal(nn.Linear(width, 3 * width))
        self.mixed = _normal(nn.Linear(width, width), residual_std)
        self.up = _normal(nn.Linear(width, 4 * width))
        self.down = _normal(nn.Linear(4 * width, width), residual_std)
        self.dropped = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropped(self.mixed(self._attend(self.norm_1(x))))
        return x + self.dropped(self.down(functional.gelu(self.up(self.norm_2(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


def model(width: int = 64, blocks: int = 4, heads: int = 4, dropout: float = 0.0, tied: bool = False) -> nn.Module:
    """Make the model: embedding, blocks, normalisation, head.

    Args:
        tied: the head has the embedding's weight.

    Reference: Alec Radford et al., "Language models are unsupervised multitask learners" (GPT-2), 2019, section 2.3.
    """
    embedding = Embedding(width, dropout)
    residual_std = 0.02 / math.sqrt(2 * blocks)  # two sums for each block: outputs keep their size, however many
    middle = [Block(width, heads, dropout, residual_std) for _ in range(blocks)]
    head = _normal(nn.Linear(width, BYTES, bias=False))
    if tied:
        head.weight = embedding.byte.weight
    return nn.Sequential(embedding, *middle, nn.LayerNorm(width), head)


# --- its measure ------------------------------------------------------------------------------------------------------
def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten().long())


def bits_per_byte(outputs: Tensor, targets: Tensor) -> Tensor:
    nats = functional.cross_entropy(outputs.transpose(1, 2), targets.long(), reduction="none")
    return nats.double().mean(dim=1) / math.log(2)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=2) == targets).double().mean(dim=1)


# --- its data ---------------------------------------------------------------------------------------------------------
def text() -> bytes:
    """Return what Python's `help("if")` and the like show, each paragraph once, by the topics' names.

    Chapters of the reference are topics, and so are their sections: a paragraph in several of them would be in the
    training text and in the test's.
    """
    paragraphs = [paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n")]
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def samples(part: bytes) -> Split:
    """Cut a text into pieces of CONTEXT bytes; y is x and the byte that follows, without x's first one."""
    read = np.frombuffer(part, np.uint8)
    count = (len(read) - 1) // CONTEXT
    x, y = (read[start : start + count * CONTEXT].reshape(count, CONTEXT) for start in (0, 1))
    return Split.of(x, y)


def data(path: Path) -> None:
    whole = text()
    end = len(whole) - len(whole) // TEST_PART
    splits = {"train": samples(whole[:end]), "test": samples(whole[end:])}
    create(path, splits, task="regression", source=f"Language reference of Python {platform.python_version()}")


job = Job(
    model=model,
    loss=loss,
    metrics={"bits_per_byte": Metric(bits_per_byte, higher_is_better=False), "accuracy": Metric(accuracy)},
    data=data,
    defaults={
        "data": {"path": "data/python-reference.h5"},
        "epochs": 6,
        "batch_size": 16,  # of each worker
        "optimizer": {"name": "AdamW", "lr": 0.003},
        "schedule": {"name": "ExponentialLR", "gamma": 0.75},
        "clip_norm": 1.0,
    },
)

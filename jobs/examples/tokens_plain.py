"""A small transformer that spells module names of Python, in plain PyTorch; tokens.py is the same on several ranks.

    python jobs/examples/tokens_plain.py

The names have different lengths: batches are padded, and the loss is a mean over the letters, without the padding.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD, END = 0, 1
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"


class Names(Dataset):
    """Names as tokens, each behind END and in front of END."""

    def __init__(self, names: Sequence[str]):
        self.names = [torch.tensor([END, *(LETTERS.index(letter) + 2 for letter in name), END]) for name in names]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Tensor:
        return self.names[number]


def collate(names: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the tokens so far, and the next ones: (batch, longest)."""
    padded = pad_sequence(names, batch_first=True, padding_value=PAD)
    return padded[:, :-1], padded[:, 1:]


class Speller(nn.Module):
    def __init__(self, width: int = 32, longest: int = 64):
        super().__init__()
        self.token = nn.Embedding(len(LETTERS) + 2, width, padding_idx=PAD)
        self.place = nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(LETTERS) + 2)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        later = torch.triu(torch.ones(length, length, dtype=torch.bool, device=tokens.device), 1)
        x = self.token(tokens) + self.place.weight[:length]
        return self.out(self.layers(x, mask=later, src_key_padding_mask=tokens == PAD))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=PAD)  # the mean over letters


def names_to_train_and_test() -> tuple[Names, Names]:
    names = sorted(name.lower() for name in sys.stdlib_module_names)
    return Names([name for i, name in enumerate(names) if i % 5]), Names(names[::5])


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    train_names, test_names = names_to_train_and_test()
    train = DataLoader(train_names, chosen.batch_size, shuffle=True, collate_fn=collate)
    test = DataLoader(test_names, chosen.batch_size, collate_fn=collate)
    model = Speller()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    mean = 0.0
    for epoch in range(chosen.epochs):
        model.train()
        for tokens, targets in train:
            optimizer.zero_grad()
            loss_of(model(tokens), targets).backward()
            optimizer.step()

        model.eval()
        total = letters = 0
        with torch.no_grad():
            for tokens, targets in test:
                count = (targets != PAD).sum().item()
                total, letters = total + loss_of(model(tokens), targets).item() * count, letters + count
        mean = total / letters
        print(f"epoch {epoch}: loss {mean:.3f}")
    return mean


if __name__ == "__main__":
    main()

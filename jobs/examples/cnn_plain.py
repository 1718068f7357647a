"""A convolutional network on handwritten digits in plain PyTorch, on one process; cnn.py is the same on several ranks.

    python jobs/examples/cnn_plain.py

It has what training scripts have: augmentation, a schedule, evaluations, TensorBoard, checkpoints to go on from.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.tensorboard import SummaryWriter


class Shifted(Dataset):
    """Images that are moved by up to one pixel, another way each time."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return self.x[number].roll((down, right), (1, 2)), self.y[number]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=Path("runs/cnn"))
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    writer = SummaryWriter(chosen.folder)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels)
    train = DataLoader(Shifted(x[360:], y[360:]), chosen.batch_size, shuffle=True)
    test = DataLoader(TensorDataset(x[:360], y[:360]), chosen.batch_size)

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 * len(train), gamma=0.7)

    first, path, accuracy = 0, chosen.folder / "checkpoint.pt", 0.0
    if path.exists():
        saved = torch.load(path)
        first = saved["epoch"] + 1
        for name, part in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
            part.load_state_dict(saved[name])

    for epoch in range(first, chosen.epochs):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()

        model.eval()
        right = total = 0
        with torch.no_grad():
            for x, y in test:
                right, total = right + (model(x).argmax(1) == y).sum().item(), total + len(y)
        accuracy = right / total
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        writer.add_scalar("accuracy", accuracy, epoch)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, path)
    writer.close()
    return accuracy


if __name__ == "__main__":
    main()

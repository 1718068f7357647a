"""A GAN on points of two clouds in plain PyTorch; gan.py is the same on several ranks.

    python jobs/examples/gan_plain.py

Two models have an optimizer each, as in PyTorch's DCGAN example.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CENTRES = torch.tensor([[2.0, 0.0], [-2.0, 0.0]])


def points(count: int = 2048) -> Tensor:
    """Return points around the two centres: the same ones in each call."""
    generator = torch.Generator().manual_seed(1)
    return CENTRES[torch.arange(count) % 2] + 0.3 * torch.randn(count, 2, generator=generator)


def make_models() -> tuple[nn.Module, nn.Module]:
    """Return a discriminator and a generator."""
    hidden = 64
    return (
        nn.Sequential(nn.Linear(2, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
                      nn.Linear(hidden, 1)),
        nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)),
    )  # fmt: skip


def distance(generator: nn.Module) -> float:
    """Return the mean distance of generated points from the nearer centre; that of the data is about 0.38."""
    noise = torch.randn(512, 4, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return torch.cdist(generator(noise), CENTRES).min(dim=1).values.mean().item()


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(points()), chosen.batch_size, shuffle=True)
    discriminator, generator = make_models()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(chosen.epochs):
        for (real,) in loader:
            yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            optimizer_d.zero_grad()
            criterion(discriminator(real), yes).backward()
            fake = generator(torch.randn(len(real), 4))
            criterion(discriminator(fake.detach()), no).backward()
            optimizer_d.step()

            optimizer_g.zero_grad()
            criterion(discriminator(fake), yes).backward()
            optimizer_g.step()
        print(f"epoch {epoch}: distance {distance(generator):.3f}")
    return distance(generator)


if __name__ == "__main__":
    main()

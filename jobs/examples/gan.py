"""gan_plain.py on several ranks, with any strategy: two models with an optimizer each.

hpcdist run -n 2 jobs/examples/gan.py --strategy gossip_pull
"""

import argparse
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from gan_plain import distance, make_models, points


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="allreduce", help="see `hpcdist strategies`")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    chosen = parser.parse_args(arguments)

    hd.init()
    torch.manual_seed(hd.rank())  # each rank draws noise of its own
    loader = hd.shard(DataLoader(TensorDataset(points()), chosen.batch_size, shuffle=True))
    discriminator, generator = make_models()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = hd.DistributedOptimizer(optimizer_d, discriminator, strategy=chosen.strategy)
    optimizer_g = hd.DistributedOptimizer(optimizer_g, generator, strategy=chosen.strategy)
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
        with hd.consensus(generator):
            found = distance(generator)
        if hd.is_main():
            print(f"epoch {epoch}: distance {found:.3f}")
    hd.finish(discriminator, generator)
    return distance(generator)


if __name__ == "__main__":
    main()

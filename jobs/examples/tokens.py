"""tokens_plain.py on several ranks, with any strategy: a small transformer on tokens of different lengths.

hpcdist run -n 2 jobs/examples/tokens.py --strategy gossip_pull
"""

import argparse
from collections.abc import Sequence

import torch
from torch.utils.data import DataLoader

import hpcdist as hd
from tokens_plain import PAD, Speller, collate, loss_of, names_to_train_and_test


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="allreduce", help="see `hpcdist strategies`")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
    chosen = parser.parse_args(arguments)

    hd.init()
    torch.manual_seed(hd.rank())  # dropout differs between ranks
    train_names, test_names = names_to_train_and_test()
    train = hd.shard(DataLoader(train_names, chosen.batch_size, shuffle=True, collate_fn=collate))
    test = hd.shard(DataLoader(test_names, chosen.batch_size, collate_fn=collate), training=False)
    model = Speller()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    optimizer = hd.DistributedOptimizer(optimizer, model, strategy=chosen.strategy)

    mean = 0.0
    for epoch in range(chosen.epochs):
        model.train()
        for tokens, targets in train:
            optimizer.zero_grad()
            optimizer.set_batch_weight((targets != PAD).sum())  # the loss is a mean over so many letters
            loss_of(model(tokens), targets).backward()
            optimizer.step()

        model.eval()
        total = letters = 0
        with hd.consensus(model), torch.no_grad():
            for tokens, targets in test:
                count = (targets != PAD).sum().item()
                total, letters = total + loss_of(model(tokens), targets).item() * count, letters + count
        mean = hd.metric(total / max(letters, 1), weight=letters)  # of all ranks' letters
        if hd.is_main():
            print(f"epoch {epoch}: loss {mean:.3f}")
    hd.finish(model)
    return mean


if __name__ == "__main__":
    main()

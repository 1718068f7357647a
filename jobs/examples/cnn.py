"""cnn_plain.py on several ranks, with any strategy: a convolutional network on handwritten digits.

    hpcdist run -n 2 jobs/examples/cnn.py --strategy gossip_pull
    tensorboard --logdir runs

A batch job that comes to its time limit, or gets a signal, saves a checkpoint and exits with status 75, for which the
batch scripts of `hpcdist submit` put it back into the queue. The same command goes on.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from cnn_plain import Shifted, make_model


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="allreduce", help="see `hpcdist strategies`")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--folder", type=Path, default=Path("runs/cnn"))
    chosen = parser.parse_args(arguments)

    comm = hd.init(run=chosen.folder, log=["tensorboard"])  # in place of SummaryWriter
    torch.manual_seed(hd.rank())  # dropout and augmentation differ between ranks
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels)
    train = hd.shard(DataLoader(Shifted(x[360:], y[360:]), chosen.batch_size, shuffle=True))
    test = hd.shard(DataLoader(TensorDataset(x[:360], y[:360]), chosen.batch_size), training=False)

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    optimizer = hd.DistributedOptimizer(optimizer, model, strategy=chosen.strategy)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 * len(train), gamma=0.7)

    checkpoints, accuracy = chosen.folder / "checkpoints", 0.0
    hd.load(checkpoints, optimizer=optimizer, schedule=schedule, loader=train)
    with hd.Leaving(comm, ends_at="slurm") as leaving:
        for epoch in range(train.next_epoch, chosen.epochs):
            model.train()
            for x, y in train:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                if leaving.step_done():
                    break
            if leaving.due():  # perhaps amid an epoch: the loader's state says where it goes on
                hd.save(checkpoints, optimizer=optimizer, schedule=schedule, loader=train)
                sys.exit(75)

            model.eval()
            right = total = 0
            with hd.consensus(model), torch.no_grad():
                for x, y in test:
                    right, total = right + (model(x).argmax(1) == y).sum().item(), total + len(y)
            accuracy = hd.metric(right / max(total, 1), weight=total)  # of all ranks' samples
            if hd.is_main():
                print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
            hd.log_metrics({"accuracy": accuracy})
            hd.save(checkpoints, optimizer=optimizer, schedule=schedule, loader=train)
    hd.finish(model)
    return accuracy


if __name__ == "__main__":
    main()

"""PyTorch Geometric with any strategy: its own DataLoader of graphs, shared among ranks. On random graphs.

    mpirun -n 4 python jobs/examples/pyg_graphs.py --strategy gossip_pull

Three lines are hpcdist's: `hd.init`, `hd.DistributedOptimizer` and `hd.shard`.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool
from torch_geometric.utils import erdos_renyi_graph

import hpcdist as hd


class Network(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.first, self.second, self.last = GCNConv(1, width), GCNConv(width, width), nn.Linear(width, 2)

    def forward(self, batch: Data) -> Tensor:
        x = self.first(batch.x, batch.edge_index).relu()
        x = self.second(x, batch.edge_index).relu()
        return self.last(global_mean_pool(x, batch.batch))


def graphs(count: int = 200) -> list[Data]:
    """Sparse graphs (class 0) and dense ones (class 1)."""
    made = []
    for i in range(count):
        edges = erdos_renyi_graph(12, 0.2 + 0.3 * (i % 2))
        degree = torch.bincount(edges[0], minlength=12).to(torch.get_default_dtype())
        made.append(Data(x=degree[:, None], edge_index=edges, y=i % 2))
    return made


def main(arguments: Sequence[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="allreduce", help="see `hpcdist strategies`")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    chosen = parser.parse_args(arguments)

    hd.init()
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer = hd.DistributedOptimizer(optimizer, model, strategy=chosen.strategy)
    loader = hd.shard(DataLoader(graphs(), chosen.batch_size, shuffle=False))
    for epoch in range(chosen.epochs):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), batch.y)
            loss.backward()
            optimizer.step()
            total += loss.item() * loader.weight
        print(f"rank {hd.rank()}: epoch {epoch}, sum of losses {total:.3f}")
    hd.finish(model)
    return model


if __name__ == "__main__":
    main()

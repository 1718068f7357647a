#!/usr/bin/env bash
# PyTorch Geometric: a batch adds the number of nodes to each attribute whose name contains "index".
#
# Guess: an attribute of a graph that holds no edges, such as sample_index, is concatenated unchanged in a batch.
# Seen: torch_geometric 2.8.1, torch 2.13.0 (CPU). By name alone: "index" anywhere in the name adds the nodes of the
# graphs before; "batch" anywhere adds the largest value so far plus 1. So sample_index 0, 1, 2, 3 of graphs with 3
# nodes reads 0, 4, 8, 12 in a batch, and batch_id 0, 2, 5, 9. A name without these words ("number") is kept. PyG
# documents the rule for "index"; batch[i] undoes it.
# Why it matters: the sampler's index is what marks repeated samples when ranks are padded to equal length, and what
# joins predictions with their inputs; both go wrong, and differ with the batch size and the order.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch_geometric==2.8.1 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
from torch_geometric.data import Batch, Data

edges = torch.tensor([[0, 1], [1, 2]])
names = ("number", "sample_index", "batch_id")
graphs = [Data(x=torch.ones(3, 1), edge_index=edges, **dict.fromkeys(names, torch.tensor([i]))) for i in range(4)]
batch = Batch.from_data_list(graphs)
for name in names:
    print(name, *batch[name].tolist(), "| of graph 2:", *batch[2][name].tolist())
PYTHON
cat >"$folder/expected" <<'EXPECTED'
number 0 1 2 3 | of graph 2: 2
sample_index 0 4 8 12 | of graph 2: 2
batch_id 0 2 5 9 | of graph 2: 2
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"

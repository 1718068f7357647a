#!/usr/bin/env bash
# torch's vector_to_parameters: the parameters become views of the vector, and training changes it.
#
# Guess: it copies the vector into the parameters, as its docstring says ("Copy slices of a vector"), and as
# parameters_to_vector copies in the other direction.
# Seen: torch 2.13.0 (CPU). Each parameter's data are replaced by a slice of the vector. After a step the vector is the
# trained one, so vector - parameters_to_vector(model) is 0 whatever was learned. Two models that are filled from one
# vector have the same memory: a step of one is a step of both. A clone of the vector is the way out.
# Why it matters: local SGD, DiLoCo and FedProx keep the last average as a vector, load it, train, and send the
# difference. The difference is 0 on all ranks, and so is its average: each rank trains alone, with a falling loss. In a
# simulation of several workers in one process all of them train one set of weights.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


for name in ("vector", "clone"):
    average = torch.zeros(2)
    models = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    for model in models:
        vector_to_parameters(average.clone() if name == "clone" else average, model.parameters())
    train(models[0])
    first, second = (parameters_to_vector(model.parameters()).tolist() for model in models)
    difference = average - parameters_to_vector(models[0].parameters())
    print(name, "average", average.tolist(), "difference", difference.tolist(), "models", first, second)
PYTHON
cat >"$folder/expected" <<'EXPECTED'
vector average [-1.0, -1.0] difference [0.0, 0.0] models [-1.0, -1.0] [-1.0, -1.0]
clone average [0.0, 0.0] difference [1.0, 1.0] models [-1.0, -1.0] [0.0, 0.0]
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"

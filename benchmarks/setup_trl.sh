#!/usr/bin/env bash
# Install TRL in its own environment, .venv-trl, for benchmarks/grpo_vs_trl.py. torch is installed first, and both with
# meshrl's constraints, so that the two trainers use the same versions of the libraries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
test -x .venv-trl/bin/python || "$python" -m venv .venv-trl
echo '*' >.venv-trl/.gitignore
.venv-trl/bin/python -m pip install --quiet --only-binary :all: -c constraints.txt torch==2.13.0
.venv-trl/bin/python -m pip install --quiet --only-binary :all: -c constraints.txt 'trl==1.16.*'
.venv-trl/bin/python -c 'import torch, transformers, trl; print("torch", torch.__version__, "transformers", transformers.__version__, "trl", trl.__version__)'

"""Checks the classes whose names come in, one a line, and answers each with a line of JSON; run by `runner`.

python -m tools.sweep.worker POLICY DROPOUT
"""

import json
import logging
import os
import sys
import warnings
from dataclasses import asdict


def main(policy: str, dropout: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what models print is no answer
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    from tools.sweep.check import check

    torch.set_num_threads(1)
    for line in sys.stdin:
        kind, name = line.split()
        answers.write(json.dumps(asdict(check(name, kind, policy, float(dropout)))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One thread for torch in the test process, as in tests/torch, and what trainers ask their environment for."""

import os

import torch

from tests.torch import processes

torch.set_num_threads(1)
os.environ |= processes.ENVIRONMENT

"""Settings that every test shares: one thread, so that bits do not depend on the machine's load."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import torch

torch.set_num_threads(1)

"""Starts the training that it is given, as sweeps and launchers do, and waits for it. It uses PyTorch itself."""

import subprocess
import sys

import torch

print("step launcher", torch.__version__.split(".")[0], flush=True)
sys.exit(subprocess.run([sys.executable, sys.argv[1]], check=False).returncode)

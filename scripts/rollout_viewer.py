"""Write a page with the rollouts of a run: the command `meshrl view`. Example: scripts/rollout_viewer.py runs/NAME"""

import sys

from meshrl.cli import main

sys.exit(main(["view", *sys.argv[1:]]))

"""`meshrl diagnose` as a script: python scripts/diagnose.py --trace fsdp CONFIG|RUN"""

import sys

from meshrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["diagnose", *sys.argv[1:]]))

import sys

from meshrl.cli import main

if __name__ == "__main__":
    sys.exit(main())

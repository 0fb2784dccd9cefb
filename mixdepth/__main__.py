import sys

from mixdepth.cli import main

sys.exit(main())

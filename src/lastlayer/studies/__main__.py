import sys

from lastlayer.studies.example import main

sys.exit(main())

import sys

from lastlayer.studies.bo.command import main

if __name__ == "__main__":
    sys.exit(main())

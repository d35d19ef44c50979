import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # the demonstrations are no part of what is installed
